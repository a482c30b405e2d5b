"""What the Gated DeltaNet kernels share: how a simdgroup holds state rows, and the fold of compact factors (equation 7).

A simdgroup holds 4 rows of a head's state [Dv, Dk]: lane l has their columns l, l + 32, ... in registers. So each row of the
state is read once, whole cache lines at a time, and nothing of the state lies in threadgroup memory.
"""

from __future__ import annotations

SIMDS, ROWS = 8, 4
TILE = SIMDS * ROWS  # rows of the state a threadgroup takes
MAX_HEAD = 512  # registers: a lane holds 4 x Dk / 32 numbers

# Needs in scope: DK, DV, ROWS, CHUNKS, `state` (the head's base), `first` (its first row), `lane`.
LOAD = """
    float s[ROWS * CHUNKS];
    DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {
        DSPINE_UNROLL for (int c = 0; c < CHUNKS; ++c) {
            const int column = c * 32 + lane, row = first + r;
            s[r * CHUNKS + c] = row < DV && column < DK ? state[size_t(row) * DK + column] : 0.0f;
        }
    }
"""

STORE = """
    DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {
        DSPINE_UNROLL for (int c = 0; c < CHUNKS; ++c) {
            const int column = c * 32 + lane, row = first + r;
            if (row < DV && column < DK) {
                kept_state[size_t(row) * DK + column] = s[r * CHUNKS + c];
            }
        }
    }
"""

# s <- e^{g_m} s + sum over j < m of e^{g_m - g_j} z_j k_j^T: only differences g_m - g_j <= 0 are exponentiated.
# Needs also: `m`, and bases of this head: fold_g (stride value_heads a token), fold_z (value_heads DV), fold_k (key_heads DK).
FOLD = """
    if (m > 0) {
        const float g_last = fold_g[size_t(m - 1) * value_heads];
        const float carry = metal::exp(g_last);
        DSPINE_UNROLL for (int i = 0; i < ROWS * CHUNKS; ++i) {
            s[i] *= carry;
        }
        for (int j = 0; j < m; ++j) {
            const float weight = metal::exp(g_last - fold_g[size_t(j) * value_heads]);
            float z[ROWS];
            DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {
                z[r] = first + r < DV ? weight * fold_z[size_t(j) * value_heads * DV + first + r] : 0.0f;
            }
            DSPINE_UNROLL for (int c = 0; c < CHUNKS; ++c) {
                const int column = c * 32 + lane;
                const float key = column < DK ? float(fold_k[size_t(j) * key_heads * DK + column]) : 0.0f;
                DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {
                    s[r * CHUNKS + c] += z[r] * key;
                }
            }
        }
    }
"""
