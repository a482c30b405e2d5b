// What a compiled kernel and the runtime share: positions, buffers, one launch, and the calls a kernel makes.
#pragma once
#include <stdint.h>
#include <stddef.h>

struct emu_position {
  uint32_t position_in_grid[3], position_in_group[3], group_in_grid[3];
  uint32_t threads_per_group[3], dispatched_threads_per_group[3], groups_per_grid[3], threads_per_grid[3];
  uint32_t index_in_group, lane, simdgroup, simdgroups, dispatched_simdgroups;
};

enum emu_buffer_kind : uint32_t { EMU_INPUT = 0, EMU_OUTPUT = 1 };

struct emu_buffer {
  const char* name;
  void* data;          // copied in (inputs, and outputs: poison or init_value), copied out (outputs)
  uint64_t bytes;
  uint32_t item;       // bytes of an element
  uint32_t kind;
  uint32_t initialised;  // an output that was given an init_value
  uint64_t unwritten;  // check mode: bytes of an output never written
  uint64_t first_unwritten;
};

typedef void (*emu_entry)(void* const* buffers, const emu_position* position);

enum emu_error : uint32_t {
  EMU_OK = 0, EMU_OUT_OF_BOUNDS, EMU_DIVERGENCE, EMU_TIME, EMU_THREADGROUP_MEMORY, EMU_RACE, EMU_UNINITIALISED, EMU_TRAP,
  EMU_STACK, EMU_SETUP
};

struct emu_launch {
  const char* kernel;
  emu_entry entry;
  emu_buffer* buffers;
  uint32_t buffer_count;
  uint32_t grid[3], group[3];
  uint32_t schedule;  // 0 forward, 1 reverse, 2 seeded random
  uint64_t seed;
  uint32_t check;
  uint32_t workers;
  double cpu_seconds;
  // results
  uint32_t error;
  char message[1024];
  uint32_t threadgroup_bytes;
  uint64_t benign_races;  // check mode: unordered writes of the very same value
};

typedef void (*emu_reducer)(const unsigned char* slots, uint32_t active, unsigned char* result);
enum { EMU_SLOT = 64 };

struct emu_exchange {
  const unsigned char* slots;   // 32 slots of EMU_SLOT bytes, one a lane
  const unsigned char* result;  // what the reducer of the last lane wrote
  uint32_t active;              // bit per lane of the simdgroup
  uint32_t lane;
};

extern "C" {
emu_exchange emu_simd(const void* value, uint32_t size, emu_reducer reducer, const char* what, int line);
void emu_simdgroup_barrier(uint32_t flags, int line);
void emu_threadgroup_barrier(uint32_t flags, int line);
void* emu_threadgroup(uint32_t id, uint64_t bytes, uint32_t item, uint64_t align, const char* name);
void emu_atomic(const void* address, uint32_t bytes);
int emu_run(emu_launch* launch);
}
