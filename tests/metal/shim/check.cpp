// Check mode: kernels compiled with -fsanitize=thread call back here for every access to memory, and a cell per byte
// remembers who touched it. Two accesses are ordered by the barriers between them whose mem_flags cover their space;
// simd_sum and friends order nothing. Threadgroups are never ordered among themselves.
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

namespace {

enum Kind : uint8_t { READ, WRITE, ATOMIC };
enum : int { READERS = 4 };
const uint32_t NOBODY = 0xFFFFFFFFu;

struct Access {
  uint32_t group = NOBODY;  // threadgroup in the grid
  uint16_t thread = 0;      // in the threadgroup
  uint8_t atomic = 0;
  uint32_t epoch = 0, simd_epoch = 0;
};

}  // namespace

struct Cell {
  Access writer, readers[READERS];
  uint8_t written = 0;
};

namespace {

bool ordered(const Access& before, const Access& now) {
  if (before.group == NOBODY) return true;
  if (before.group != now.group) return false;
  if (before.thread == now.thread || before.epoch < now.epoch) return true;
  return before.thread / 32 == now.thread / 32 && before.simd_epoch < now.simd_epoch;
}

Access access_now(Worker& w, Space space, bool atomic) {
  const Lane& lane = *w.current;
  const Simdgroup& g = w.groups[lane.position.simdgroup];
  Access a;
  a.group = uint32_t(w.group_index);
  a.thread = uint16_t(lane.position.index_in_group);
  a.atomic = atomic;
  a.epoch = w.epoch[space];
  a.simd_epoch = g.epoch[space];
  return a;
}

void remember_reader(Cell& cell, const Access& now) {
  int slot = -1;
  for (int i = 0; i < READERS; ++i) {
    Access& r = cell.readers[i];
    if (r.group == now.group && r.thread == now.thread) { slot = i; break; }
    if (slot < 0 && ordered(r, now)) slot = i;  // a later write that is ordered after us is ordered after that one too
  }
  if (slot >= 0) cell.readers[slot] = now;
}

[[noreturn]] void fail_race(Worker& w, const Region& r, uint64_t at, const char* what, const Access& other, const char* other_what) {
  emu_fail(w, EMU_RACE, "race: %s '%s' at byte %llu (element %llu), %s by thread %u of threadgroup number %u with no barrier between",
           what, r.name, (unsigned long long)at, (unsigned long long)(at / r.item), other_what, unsigned(other.thread), other.group);
}

// The region an address lies in, with exact bounds; nullptr for stacks and constants.
Region* locate(Worker& w, const char* a, uint32_t bytes, const char* what) {
  if (a >= w.stacks && a < w.stacks + w.stack_span) return nullptr;
  Region* r = const_cast<Region*>(emu_find(w, a));
  if (!r) return nullptr;
  if (a < r->base || a + bytes > r->base + r->bytes)
    emu_fail(w, EMU_OUT_OF_BOUNDS, "out-of-bounds %s of '%s': byte %lld, it has %llu bytes (%llu elements)", what, r->name,
             (long long)(a < r->base ? a - r->base : a >= r->base + r->bytes ? a - r->base : int64_t(r->bytes)), (unsigned long long)r->bytes,
             (unsigned long long)(r->bytes / r->item));
  return r;
}

void on_read(Worker& w, const char* a, uint32_t bytes, bool atomic) {
  Region* r = locate(w, a, bytes, "read");
  if (!r) return;
  uint64_t at = uint64_t(a - r->base);
  Access now = access_now(w, r->space, atomic);
  uint32_t judged = bytes > 8 ? bytes - 4 : bytes;  // the last word of a three-element vector is padding
  for (uint32_t i = 0; i < bytes; ++i) {
    Cell& cell = r->cells[at + i];
    if (!cell.written && i < judged)
      emu_fail(w, EMU_UNINITIALISED, "uninitialised read of '%s' at byte %llu (element %llu)", r->name, (unsigned long long)(at + i),
               (unsigned long long)((at + i) / r->item));
    if (!ordered(cell.writer, now) && !(atomic && cell.writer.atomic)) fail_race(w, *r, at + i, "read of", cell.writer, "written");
    remember_reader(cell, now);
  }
}

void on_write(Worker& w, char* a, uint32_t bytes, bool atomic) {
  Region* r = locate(w, a, bytes, "write");
  if (!r) return;
  uint64_t at = uint64_t(a - r->base);
  Access now = access_now(w, r->space, atomic);
  const Access* clash = nullptr;
  Access other;
  for (uint32_t i = 0; i < bytes; ++i) {
    Cell& cell = r->cells[at + i];
    for (const Access& reader : cell.readers)
      if (!ordered(reader, now) && !(atomic && reader.atomic)) fail_race(w, *r, at + i, "write of", reader, "read");
    if (!clash && !ordered(cell.writer, now) && !(atomic && cell.writer.atomic)) {
      other = cell.writer;
      clash = &other;
    }
    cell.writer = now;
    cell.written = 1;
    for (Access& reader : cell.readers) reader = Access();
  }
  // Two unordered writes are forgiven when both write the same value; the value is known at the lane's next event.
  if (clash) {
    if (bytes > sizeof w.pending.before) fail_race(w, *r, at, "write of", *clash, "written");
    w.pending.address = a;
    w.pending.bytes = bytes;
    w.pending.region = r;
    w.pending.other = clash->thread;
    w.pending.other_group = clash->group;
    memcpy(w.pending.before, a, bytes);
  }
}

inline void event(const void* address, uint32_t bytes, Kind kind) {
  Worker* w = emu_self;
  if (!w || !w->check || !w->current) return;
  emu_flush(*w);
  char* a = static_cast<char*>(const_cast<void*>(address));
  if (kind == READ) on_read(*w, a, bytes, false);
  else on_write(*w, a, bytes, kind == ATOMIC);
}

}  // namespace

void emu_shadow(Region& r, bool written) {
  if (r.cell_count < r.bytes || !r.cells) {
    free(r.cells);
    r.cell_count = r.bytes ? r.bytes : 1;
    r.cells = static_cast<Cell*>(malloc(r.cell_count * sizeof(Cell)));
    if (!r.cells) abort();
  }
  Cell fresh;
  fresh.written = written;
  for (uint64_t i = 0; i < r.bytes; ++i) r.cells[i] = fresh;
}

void emu_flush(Worker& w) {
  Pending& p = w.pending;
  if (!p.bytes) return;
  uint32_t bytes = p.bytes;
  p.bytes = 0;
  if (memcmp(p.address, p.before, bytes) == 0) {
    w.benign++;
    return;
  }
  Access other;
  other.thread = uint16_t(p.other);
  other.group = p.other_group;
  fail_race(w, *p.region, uint64_t(p.address - p.region->base), "write (of another value) of", other, "written");
}

void emu_count_unwritten(const Region& r, emu_buffer& b) {
  b.unwritten = 0;
  for (uint64_t i = 0; i < r.bytes; ++i)
    if (!r.cells[i].written && !b.unwritten++) b.first_unwritten = i;
}

extern "C" {
void emu_atomic(const void* address, uint32_t bytes) { event(address, bytes, ATOMIC); }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define EMU_ACCESS(n)                                                            \
  void __tsan_read##n(void* a) { event(a, n, READ); }                            \
  void __tsan_write##n(void* a) { event(a, n, WRITE); }                          \
  void __tsan_unaligned_read##n(void* a) { event(a, n, READ); }                  \
  void __tsan_unaligned_write##n(void* a) { event(a, n, WRITE); }                \
  void __tsan_volatile_read##n(void* a) { event(a, n, READ); }                   \
  void __tsan_volatile_write##n(void* a) { event(a, n, WRITE); }                 \
  void __tsan_unaligned_volatile_read##n(void* a) { event(a, n, READ); }         \
  void __tsan_unaligned_volatile_write##n(void* a) { event(a, n, WRITE); }
EMU_ACCESS(1) EMU_ACCESS(2) EMU_ACCESS(4) EMU_ACCESS(8) EMU_ACCESS(16)
void __tsan_read_range(void* a, size_t n) { event(a, uint32_t(n), READ); }
void __tsan_write_range(void* a, size_t n) { event(a, uint32_t(n), WRITE); }
}
