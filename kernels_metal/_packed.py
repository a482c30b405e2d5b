"""Metal text shared by the products with packed weights: ROWS rows of x times COLS columns, weights read once.

The lanes of a simdgroup split the inner width by packs: the fewest words that hold whole values (8 values of 4 bits in one
word, 16 of 6 bits in three). Each value is unpacked once and used for all rows.
"""

from __future__ import annotations

from dspine.kernels_metal._source import REDUCE

PACKED = (
    REDUCE
    + """
constant constexpr int pack_words(int bits) { return 32 % bits == 0 ? 1 : (bits == 6 ? 3 : bits); }

// Value `index` of a pack of `bits`-wide values.
template <int BITS>
inline float packed_value(thread const uint* words, int index) {
    const int place = index * BITS, word = place / 32, offset = place % 32;
    uint value = words[word] >> offset;
    if (offset + BITS > 32) {
        value |= words[word + 1] << (32 - offset);
    }
    return float(value & ((1u << BITS) - 1u));
}

// sums[r * COLS + c] += x[row r] . weights[column c], this lane's packs.
template <int ROWS, int COLS, int BITS, int GROUP, typename X, typename W, typename S>
inline void add_packed(thread float* sums, thread const X* x, thread const W* words, thread const S* scales,
                       thread const S* biases, int width, uint lane) {
    constexpr int WORDS = pack_words(BITS), VALUES = WORDS * 32 / BITS;
    for (int pack = int(lane); pack < width / VALUES; pack += 32) {
        uint held[COLS][WORDS];
        float scale[COLS], bias[COLS];
        const int group = pack * VALUES / GROUP;
        DSPINE_UNROLL for (int c = 0; c < COLS; ++c) {
            DSPINE_UNROLL for (int i = 0; i < WORDS; ++i) {
                held[c][i] = uint(words[c][pack * WORDS + i]);
            }
            scale[c] = float(scales[c][group]);
            bias[c] = float(biases[c][group]);
        }
        DSPINE_UNROLL for (int v = 0; v < VALUES; ++v) {
            float left[ROWS];
            DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {
                left[r] = float(x[r][pack * VALUES + v]);
            }
            DSPINE_UNROLL for (int c = 0; c < COLS; ++c) {
                const float weight = packed_value<BITS>(held[c], v) * scale[c] + bias[c];
                DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {
                    sums[r * COLS + c] += left[r] * weight;
                }
            }
        }
    }
}
"""
)
