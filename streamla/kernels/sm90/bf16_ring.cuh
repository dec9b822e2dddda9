// The ring of slots between the warps that load tiles and those that use them.
#pragma once

#include "bf16_tile.cuh"

namespace streamla {

// A place in the ring. Both sides walk it in the same way: a slot for each tile.
struct Ring {
    u32 shared;
    int slot = 0;
    u32 round = 0;  // its parity

    DEVICE int tokens() const { return slot == 0 ? SHORT_N : TILE_N; }
    DEVICE u32 address() const {
        return shared + Shared::SLOT + (slot == 0 ? 0 : SHORT_N + (slot - 1) * TILE_N) * TOKEN_BYTES;
    }
    DEVICE u32 full() const { return shared + Shared::FULL + slot * 8; }
    DEVICE u32 empty() const { return shared + Shared::EMPTY + slot * 8; }
    DEVICE void wait_full() const { mbarrier_wait(full(), round); }
    DEVICE void wait_empty() const { mbarrier_wait(empty(), round ^ 1); }
    DEVICE void advance() {
        if (++slot < SLOTS) return;
        slot = 0;
        round ^= 1;
    }
};

DEVICE void init_barriers(u32 shared) {
    for (int s = 0; s < SLOTS; s++) {
        mbarrier_init(shared + Shared::FULL + s * 8, LOAD_WARPS);
        mbarrier_init(shared + Shared::EMPTY + s * 8, MATH_WARPS);
    }
    mbarrier_init(shared + Shared::QUERY_FULL, QUERY_WARPS);
    mbarrier_init(shared + Shared::QUERY_EMPTY, MATH_WARPS);
    fence_mbarrier_init();
}

}  // namespace streamla
