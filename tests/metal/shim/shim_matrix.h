// simdgroup_matrix, 8 x 8: lane l holds two neighbours of a row, laid out as in MLX's get_coord. Products are summed in float,
// in ascending k: the hardware's own order is not known.
#pragma once
namespace metal {
METAL_FUNC void emu_coord(uint32_t lane, int& row, int& column) {
  uint32_t quad = lane / 4;
  row = int((quad & 4) + (lane / 2) % 4);
  column = int((quad & 2) * 2 + (lane % 2) * 2);
}
template <class T, int Columns = 8, int Rows = 8> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "only 8 x 8 exists");
  vec<T, 2> emu_elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal, EMU_SITE) {
    int row, column;
    emu_coord(emu_share(diagonal, nullptr, "simdgroup_matrix", emu_line).lane, row, column);
    emu_elements = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
  }
  vec<T, 2>& thread_elements() { return emu_elements; }
  const vec<T, 2>& thread_elements() const { return emu_elements; }
};
template <class T, int C, int R> METAL_FUNC simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, C, R> m;
  m.emu_elements = vec<T, 2>(value, value);
  return m;
}
template <class T> METAL_FUNC void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* p, ulong stride = 8, vec<ulong, 2> origin = vec<ulong, 2>(0),
                                                   bool transpose = false, EMU_SITE) {
  int row, column;
  emu_coord(emu_share(true, nullptr, "simdgroup_load", emu_line).lane, row, column);
  for (int j = 0; j < 2; ++j) {
    ulong r = transpose ? column + j : row, c = transpose ? row : column + j;
    d.emu_elements[j] = p[(origin.y + r) * stride + origin.x + c];
  }
}
template <class T> METAL_FUNC void simdgroup_store(const simdgroup_matrix<T, 8, 8>& d, T* p, ulong stride = 8, vec<ulong, 2> origin = vec<ulong, 2>(0),
                                                    bool transpose = false, EMU_SITE) {
  int row, column;
  emu_coord(emu_share(true, nullptr, "simdgroup_store", emu_line).lane, row, column);
  for (int j = 0; j < 2; ++j) {
    ulong r = transpose ? column + j : row, c = transpose ? row : column + j;
    p[(origin.y + r) * stride + origin.x + c] = d.emu_elements[j];
  }
}
template <class A, class B, class C> struct emu_operands { vec<A, 2> a; vec<B, 2> b; vec<C, 2> c; };
template <class A, class B, class C, class D> inline void emu_multiply(const unsigned char* slots, uint32_t active, unsigned char* result) {
  float a[8][8], b[8][8], c[8][8];
  for (uint32_t lane = 0; lane < 32; ++lane) {
    int row, column;
    emu_coord(lane, row, column);
    auto o = active >> lane & 1 ? emu_slot<emu_operands<A, B, C>>(slots, lane) : emu_undefined<emu_operands<A, B, C>>();
    for (int j = 0; j < 2; ++j) {
      a[row][column + j] = float(o.a[j]);
      b[row][column + j] = float(o.b[j]);
      c[row][column + j] = float(o.c[j]);
    }
  }
  for (uint32_t lane = 0; lane < 32; ++lane) {
    int row, column;
    emu_coord(lane, row, column);
    vec<D, 2> d;
    for (int j = 0; j < 2; ++j) {
      float sum = c[row][column + j];
      for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][column + j];
      d[j] = D(sum);
    }
    __builtin_memcpy(result + lane * EMU_SLOT, &d, sizeof d);
  }
}
template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                                              const simdgroup_matrix<C, 8, 8>& c, EMU_SITE) {
  emu_operands<A, B, C> o{a.emu_elements, b.emu_elements, c.emu_elements};
  emu_exchange e = emu_share(o, &emu_multiply<A, B, C, D>, "simdgroup_multiply_accumulate", emu_line);
  d.emu_elements = emu_slot<vec<D, 2>>(e.result, e.lane);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, EMU_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), emu_line);
}
}  // namespace metal
using simdgroup_float8x8 = metal::simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = metal::simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = metal::simdgroup_matrix<bfloat, 8, 8>;
