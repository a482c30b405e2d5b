// State of the runtime: lanes, simdgroups, guarded regions, workers.
#pragma once
#include <pthread.h>
#include <setjmp.h>

#include "abi.h"

enum : uint32_t { MAX_LANES = 1024, MAX_ARRAYS = 64, MAX_BUFFERS = 128, MAX_WORKERS = 16 };
enum : size_t { STACK = 128 * 1024 };
enum LaneState : uint8_t { READY, WAIT_SIMD, WAIT_GROUP, DONE };
enum Space : uint8_t { SPACE_DEVICE = 0, SPACE_THREADGROUP = 1 };

struct Cell;  // check mode: who touched a byte (check.cpp)

// Data between two inaccessible spans.
struct Region {
  const char* name = "";
  char *pages = nullptr, *base = nullptr;
  uint64_t page_bytes = 0, bytes = 0;
  uint32_t item = 1;
  Space space = SPACE_DEVICE;
  bool live = false;
  Cell* cells = nullptr;
  uint64_t cell_count = 0;
  void map(uint64_t capacity);
  void unmap();
  void place(uint64_t size, uint64_t align, uint32_t element, Space where);
  void poison();
  int64_t spoilt() const;
};

struct Lane {
  void* sp;
  emu_position position;
  LaneState state;
  uint32_t rank;  // in the order of its simdgroup
  uint32_t exchanges;
  const char* what;
  int line;
};

struct Simdgroup {
  uint32_t first, count, runnable, arrived, active, rank, flags;
  uint32_t epoch[2];
  const char* what;
  int line;
  uint32_t order[32];
  alignas(64) unsigned char slots[2][32 * EMU_SLOT];
  alignas(64) unsigned char results[2][32 * EMU_SLOT];
};

struct Pending {  // check mode: an unordered write whose value is compared at the next event
  char* address;
  uint32_t bytes;
  const Region* region;
  uint32_t other;  // index in its threadgroup of the thread that wrote before
  uint32_t other_group;
  unsigned char before[64];
};

struct Launch {
  emu_launch* config;
  Region regions[MAX_BUFFERS];
  void* addresses[MAX_BUFFERS];
  uint32_t region_count = 0;
  uint64_t next = 0, total = 0;
  uint32_t finished = 0;
  bool stop = false;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
};

struct Worker {
  pthread_t thread;
  Launch* run;
  sigjmp_buf home;
  void* home_sp;
  Lane *lanes, *current;
  Simdgroup* groups;
  uint32_t group_order[MAX_LANES / 32];
  uint32_t lane_count, group_count, done, arrived, flags, stacks_ready;
  int line;
  uint32_t epoch[2];
  uint64_t group_index, random, threadgroup_bytes, max_threadgroup_bytes, benign;
  char* stacks;
  size_t stack_span;
  Region arrays[MAX_ARRAYS];
  Pending pending;
  uint32_t check;
  volatile bool inside, finished;
};

extern __thread Worker* emu_self;
[[noreturn]] void emu_fail(Worker& w, uint32_t error, const char* format, ...) __attribute__((format(printf, 3, 4)));
const Region* emu_find(Worker& w, const char* address);

// check.cpp
void emu_shadow(Region& region, bool written);
void emu_flush(Worker& w);
void emu_count_unwritten(const Region& region, emu_buffer& buffer);
