// <metal_atomic>: real atomics, because OS threads run threadgroups side by side. memory_order_relaxed is all that Metal has.
#pragma once
namespace metal {
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T emu_value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;
#define EMU_ATOMIC __attribute__((noinline, no_sanitize("thread"))) inline
template <class T> EMU_ATOMIC T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  emu_atomic(const_cast<const atomic<T>*>(p), sizeof(T));
  T r;
  __atomic_load(const_cast<T*>(&p->emu_value), &r, __ATOMIC_RELAXED);
  return r;
}
template <class T, class U> EMU_ATOMIC void atomic_store_explicit(volatile atomic<T>* p, U value, memory_order) {
  emu_atomic(const_cast<atomic<T>*>(p), sizeof(T));
  T v = T(value);
  __atomic_store(const_cast<T*>(&p->emu_value), &v, __ATOMIC_RELAXED);
}
template <class T, class F> EMU_ATOMIC T emu_update(volatile atomic<T>* p, F f) {
  emu_atomic(const_cast<atomic<T>*>(p), sizeof(T));
  T* a = const_cast<T*>(&p->emu_value);
  T old, next;
  __atomic_load(a, &old, __ATOMIC_RELAXED);
  do next = f(old); while (!__atomic_compare_exchange(a, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
#define EMU_FETCH(name, expression)                                                                        \
  template <class T, class U> inline T name(volatile atomic<T>* p, U value, memory_order) {                \
    T b = T(value);                                                                                        \
    return emu_update(p, [b](T a) -> T { (void)a; return T(expression); });                                \
  }
EMU_FETCH(atomic_fetch_add_explicit, a + b) EMU_FETCH(atomic_fetch_sub_explicit, a - b) EMU_FETCH(atomic_fetch_and_explicit, a & b)
EMU_FETCH(atomic_fetch_or_explicit, a | b) EMU_FETCH(atomic_fetch_xor_explicit, a ^ b) EMU_FETCH(atomic_fetch_max_explicit, a < b ? b : a)
EMU_FETCH(atomic_fetch_min_explicit, b < a ? b : a) EMU_FETCH(atomic_exchange_explicit, b)
#undef EMU_FETCH
template <class T, class U>
EMU_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected, U desired, memory_order, memory_order) {
  emu_atomic(const_cast<atomic<T>*>(p), sizeof(T));
  T d = T(desired);
  return __atomic_compare_exchange(const_cast<T*>(&p->emu_value), expected, &d, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#undef EMU_ATOMIC
}  // namespace metal
