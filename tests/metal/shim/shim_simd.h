// Barriers and simdgroup operations: each is a rendezvous of all lanes; a sum is the butterfly 1, 2, 4, 8, 16.
#pragma once
namespace metal {
enum class mem_flags : uint32_t { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint32_t(a) | uint32_t(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags flags, EMU_SITE) { emu_threadgroup_barrier(uint32_t(flags), emu_line); }
METAL_FUNC void simdgroup_barrier(mem_flags flags, EMU_SITE) { emu_simdgroup_barrier(uint32_t(flags), emu_line); }

template <class T> METAL_FUNC T emu_slot(const unsigned char* slots, uint32_t lane) {
  T r;
  __builtin_memcpy(&r, slots + lane * EMU_SLOT, sizeof(T));
  return r;
}
template <class T> METAL_FUNC T emu_undefined() { T r; __builtin_memset(&r, 0xFF, sizeof(T)); return r; }
template <class T> METAL_FUNC emu_exchange emu_share(const T& value, emu_reducer reducer, const char* what, int line) {
  static_assert(sizeof(T) <= EMU_SLOT, "too large for a simdgroup operation");
  return emu_simd(&value, sizeof(T), reducer, what, line);
}
// f(a, b) over the active lanes; an absent lane takes no part
template <class T, class F> inline void emu_butterfly(const unsigned char* slots, uint32_t active, unsigned char* result) {
  T v[32];
  for (int i = 0; i < 32; ++i) v[i] = active >> i & 1 ? emu_slot<T>(slots, i) : T(0);
  for (int step = 1; step < 32; step *= 2) {
    for (int i = 0; i < 32; i += 2 * step) {  // lane i holds the value of its block; only present blocks count
      uint32_t block = ((1ull << step) - 1) << i;
      bool left = active & block, right = active & (uint32_t(uint64_t(block) << step));
      if (left && right) v[i] = F::apply(v[i], v[i + step]);
      else if (right) v[i] = v[i + step];
    }
  }
  __builtin_memcpy(result, &v[0], sizeof(T));
}
// lane by lane; exclusive leaves lane 0 at the neutral element
template <class T, class F, bool exclusive> inline void emu_scan(const unsigned char* slots, uint32_t active, unsigned char* result) {
  T sum = F::template neutral<T>();
  for (int i = 0; i < 32; ++i) {
    if (!(active >> i & 1)) continue;
    T next = F::apply(sum, emu_slot<T>(slots, i));
    T out = exclusive ? sum : next;
    __builtin_memcpy(result + i * EMU_SLOT, &out, sizeof(T));
    sum = next;
  }
}
#define EMU_COMBINE(name, expression, start)                       \
  struct name {                                                    \
    template <class T> static T apply(T a, T b) { return expression; } \
    template <class T> static T neutral() { return T(start); }     \
  };
EMU_COMBINE(EmuSum, T(a + b), 0) EMU_COMBINE(EmuProduct, T(a * b), 1) EMU_COMBINE(EmuMax, T(metal::max(a, b)), 0)
EMU_COMBINE(EmuMin, T(metal::min(a, b)), 0) EMU_COMBINE(EmuAnd, T(a & b), 0) EMU_COMBINE(EmuOr, T(a | b), 0) EMU_COMBINE(EmuXor, T(a ^ b), 0)
template <class F> struct emu_vector { template <class V> static V apply(V a, V b) { for (int i = 0; i < emu_width<V>; ++i) a[i] = F::apply(a[i], b[i]); return a; } template <class V> static V neutral() { return V(0); } };
#undef EMU_COMBINE
#define EMU_REDUCE(name, F)                                                                                     \
  template <class T> METAL_FUNC T name(T value, EMU_SITE) {                                                     \
    using G = conditional_t<emu_is_vec<T>, emu_vector<F>, F>;                                                   \
    return emu_slot<T>(emu_share(value, &emu_butterfly<T, G>, #name, emu_line).result, 0);                      \
  }
EMU_REDUCE(simd_sum, EmuSum) EMU_REDUCE(simd_product, EmuProduct) EMU_REDUCE(simd_max, EmuMax) EMU_REDUCE(simd_min, EmuMin)
EMU_REDUCE(simd_and, EmuAnd) EMU_REDUCE(simd_or, EmuOr) EMU_REDUCE(simd_xor, EmuXor)
#undef EMU_REDUCE
#define EMU_SCAN(name, F, exclusive)                                                                            \
  template <class T> METAL_FUNC T name(T value, EMU_SITE) {                                                     \
    emu_exchange e = emu_share(value, &emu_scan<T, F, exclusive>, #name, emu_line);                             \
    return emu_slot<T>(e.result, e.lane);                                                                       \
  }
EMU_SCAN(simd_prefix_inclusive_sum, EmuSum, false) EMU_SCAN(simd_prefix_exclusive_sum, EmuSum, true)
EMU_SCAN(simd_prefix_inclusive_product, EmuProduct, false) EMU_SCAN(simd_prefix_exclusive_product, EmuProduct, true)
#undef EMU_SCAN
// Metal leaves the value of a lane that is not there undefined: it is poison here.
template <class T> METAL_FUNC T emu_from(const emu_exchange& e, uint32_t lane) {
  return lane < 32 && (e.active >> lane & 1) ? emu_slot<T>(e.slots, lane) : emu_undefined<T>();
}
template <class T> METAL_FUNC T simd_shuffle(T value, ushort lane, EMU_SITE) {
  return emu_from<T>(emu_share(value, nullptr, "simd_shuffle", emu_line), lane);
}
template <class T> METAL_FUNC T simd_broadcast(T value, ushort lane, EMU_SITE) {
  return emu_from<T>(emu_share(value, nullptr, "simd_broadcast", emu_line), lane);
}
template <class T> METAL_FUNC T simd_broadcast_first(T value, EMU_SITE) {
  return emu_from<T>(emu_share(value, nullptr, "simd_broadcast_first", emu_line), 0);
}
template <class T> METAL_FUNC T simd_shuffle_xor(T value, ushort mask, EMU_SITE) {
  emu_exchange e = emu_share(value, nullptr, "simd_shuffle_xor", emu_line);
  return emu_from<T>(e, e.lane ^ mask);
}
template <class T> METAL_FUNC T simd_shuffle_up(T value, ushort delta, EMU_SITE) {
  emu_exchange e = emu_share(value, nullptr, "simd_shuffle_up", emu_line);
  return e.lane >= delta ? emu_from<T>(e, e.lane - delta) : value;
}
template <class T> METAL_FUNC T simd_shuffle_down(T value, ushort delta, EMU_SITE) {
  emu_exchange e = emu_share(value, nullptr, "simd_shuffle_down", emu_line);
  return e.lane + delta < 32 ? emu_from<T>(e, e.lane + delta) : value;
}
template <class T> METAL_FUNC T simd_shuffle_rotate_up(T value, ushort delta, EMU_SITE) {
  emu_exchange e = emu_share(value, nullptr, "simd_shuffle_rotate_up", emu_line);
  return emu_from<T>(e, (e.lane - delta) & 31);
}
template <class T> METAL_FUNC T simd_shuffle_rotate_down(T value, ushort delta, EMU_SITE) {
  emu_exchange e = emu_share(value, nullptr, "simd_shuffle_rotate_down", emu_line);
  return emu_from<T>(e, (e.lane + delta) & 31);
}
template <class T> METAL_FUNC T simd_shuffle_and_fill_up(T value, T filling, ushort delta, EMU_SITE) {
  struct Pair { T value, filling; } pair{value, filling};
  emu_exchange e = emu_share(pair, nullptr, "simd_shuffle_and_fill_up", emu_line);
  return e.lane >= delta ? emu_from<Pair>(e, e.lane - delta).value : emu_from<Pair>(e, 32 + e.lane - delta).filling;
}
template <class T> METAL_FUNC T simd_shuffle_and_fill_down(T value, T filling, ushort delta, EMU_SITE) {
  struct Pair { T value, filling; } pair{value, filling};
  emu_exchange e = emu_share(pair, nullptr, "simd_shuffle_and_fill_down", emu_line);
  return e.lane + delta < 32 ? emu_from<Pair>(e, e.lane + delta).value : emu_from<Pair>(e, e.lane + delta - 32).filling;
}
inline void emu_votes(const unsigned char* slots, uint32_t active, unsigned char* result) {
  uint64_t bits = 0;
  for (int i = 0; i < 32; ++i)
    if ((active >> i & 1) && slots[i * EMU_SLOT]) bits |= 1ull << i;
  __builtin_memcpy(result, &bits, 8);
}
struct simd_vote {
  using vote_t = uint64_t;
  uint64_t bits;
  uint32_t active;
  explicit operator vote_t() const { return bits; }
  bool all() const { return bits == active; }
  bool any() const { return bits != 0; }
};
METAL_FUNC simd_vote emu_ballot(bool value, const char* what, int line) {
  emu_exchange e = emu_share(value, &emu_votes, what, line);
  return {emu_slot<uint64_t>(e.result, 0), e.active};
}
METAL_FUNC simd_vote simd_ballot(bool value, EMU_SITE) { return emu_ballot(value, "simd_ballot", emu_line); }
METAL_FUNC bool simd_all(bool value, EMU_SITE) { return emu_ballot(value, "simd_all", emu_line).all(); }
METAL_FUNC bool simd_any(bool value, EMU_SITE) { return emu_ballot(value, "simd_any", emu_line).any(); }
METAL_FUNC bool simd_is_first(EMU_SITE) { return emu_share(true, nullptr, "simd_is_first", emu_line).lane == 0; }

// Quads rendezvous with their whole simdgroup: stricter than Metal.
#define EMU_QUAD(name, from)                                                          \
  template <class T> METAL_FUNC T name(T value, ushort n, EMU_SITE) {                 \
    emu_exchange e = emu_share(value, nullptr, #name, emu_line);                      \
    uint32_t quad = e.lane & ~3u, lane = e.lane & 3u;                                 \
    (void)quad; (void)lane;                                                           \
    return emu_from<T>(e, from);                                                      \
  }
EMU_QUAD(quad_broadcast, quad + n) EMU_QUAD(quad_shuffle, quad + n) EMU_QUAD(quad_shuffle_xor, quad + (lane ^ n))
EMU_QUAD(quad_shuffle_down, lane + n < 4 ? e.lane + n : e.lane) EMU_QUAD(quad_shuffle_up, lane >= n ? e.lane - n : e.lane)
#undef EMU_QUAD
#define EMU_QUAD(name, F)                                                                                          \
  template <class T> METAL_FUNC T name(T value, EMU_SITE) {                                                        \
    emu_exchange e = emu_share(value, nullptr, #name, emu_line);                                                   \
    uint32_t q = e.lane & ~3u;                                                                                     \
    T a = F::template apply<T>(emu_from<T>(e, q), emu_from<T>(e, q + 1));                                          \
    T b = F::template apply<T>(emu_from<T>(e, q + 2), emu_from<T>(e, q + 3));                                      \
    return F::template apply<T>(a, b);                                                                             \
  }
EMU_QUAD(quad_sum, EmuSum) EMU_QUAD(quad_product, EmuProduct) EMU_QUAD(quad_max, EmuMax) EMU_QUAD(quad_min, EmuMin)
#undef EMU_QUAD
}  // namespace metal
