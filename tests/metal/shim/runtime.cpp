// The machine below a kernel: one stackful fiber per Metal thread, rendezvous, guard pages, watchdog.
// One OS thread runs whole threadgroups; inside it, lanes run one at a time, each to its next rendezvous.
#include "runtime.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

__thread Worker* emu_self = nullptr;

// ---------------------------------------------------------------------------------------------------- context switch
extern "C" void emu_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.hidden emu_switch
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.hidden emu_switch
.globl emu_switch
.type emu_switch,%function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the context switch is written for x86-64 and aarch64"
#endif

static void lane_main();

static void prepare_stack(Lane& lane, char* top) {
  void** sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
#if defined(__x86_64__)
  *--sp = nullptr;                               // keeps the stack aligned as after a call
  *--sp = reinterpret_cast<void*>(&lane_main);   // `ret` of emu_switch
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
#else
  sp -= 20;
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void*>(&lane_main);  // x30
#endif
  lane.sp = sp;
}

// ------------------------------------------------------------------------------------------------------------ failing
[[noreturn]] void emu_fail(Worker& w, uint32_t error, const char* format, ...) {
  w.inside = false;  // a late watchdog signal must not come in here
  Launch& run = *w.run;
  pthread_mutex_lock(&run.mutex);
  if (run.config->error == EMU_OK) {
    run.config->error = error;
    char text[700];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    char where[256] = "";
    if (w.current) {
      const emu_position& p = w.current->position;
      snprintf(where, sizeof where, " [thread (%u, %u, %u) of threadgroup (%u, %u, %u), simdgroup %u, lane %u]",
               p.position_in_group[0], p.position_in_group[1], p.position_in_group[2], p.group_in_grid[0],
               p.group_in_grid[1], p.group_in_grid[2], p.simdgroup, p.lane);
    }
    snprintf(run.config->message, sizeof run.config->message, "%s%s", text, where);
    __atomic_store_n(&run.stop, true, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&run.mutex);
  siglongjmp(w.home, 1);
}

// --------------------------------------------------------------------------------------------------------- scheduling
static inline uint64_t next_random(Worker& w) {
  w.random ^= w.random << 13;
  w.random ^= w.random >> 7;
  w.random ^= w.random << 17;
  return w.random;
}

static void shuffle(Worker& w, uint32_t* list, uint32_t n) {
  for (uint32_t i = n; i > 1; --i) {
    uint32_t j = next_random(w) % i;
    uint32_t t = list[i - 1];
    list[i - 1] = list[j];
    list[j] = t;
  }
}

static Lane* runnable_in(Worker& w, Simdgroup& g, uint32_t start) {
  if (!g.runnable) return nullptr;
  for (uint32_t i = 0; i < g.count; ++i) {
    uint32_t at = start + i;
    if (at >= g.count) at -= g.count;
    Lane& lane = w.lanes[g.order[at]];
    if (lane.state == READY) return &lane;
  }
  return nullptr;
}

// The next lane to run: the same simdgroup first, in its order; under the random schedule sometimes another one.
static Lane* pick(Worker& w, Lane& from) {
  Simdgroup& mine = w.groups[from.position.simdgroup];
  bool wander = w.run->config->schedule == 2 && (next_random(w) & 3) == 0;
  if (!wander)
    if (Lane* lane = runnable_in(w, mine, from.rank + 1)) return lane;
  uint32_t rank = mine.rank;
  for (uint32_t i = 1; i <= w.group_count; ++i) {
    Simdgroup& g = w.groups[w.group_order[(rank + i) % w.group_count]];
    if (Lane* lane = runnable_in(w, g, &g == &mine ? from.rank + 1 : 0)) return lane;
  }
  return nullptr;
}

static const char* state_text(const Lane& lane) {
  switch (lane.state) {
    case WAIT_SIMD:
    case WAIT_GROUP: return lane.what;
    case DONE: return "the end of the kernel";
    default: return "running";
  }
}

[[noreturn]] static void fail_divergence(Worker& w) {
  // Name one waiting lane and one lane that went elsewhere.
  const Lane *waiting = nullptr, *other = nullptr;
  for (uint32_t i = 0; i < w.lane_count; ++i)
    if (w.lanes[i].state == WAIT_SIMD || w.lanes[i].state == WAIT_GROUP) { waiting = &w.lanes[i]; break; }
  for (uint32_t i = 0; waiting && i < w.lane_count; ++i) {
    const Lane& lane = w.lanes[i];
    bool same_set = waiting->state == WAIT_GROUP || lane.position.simdgroup == waiting->position.simdgroup;
    if (same_set && (lane.state != waiting->state || lane.line != waiting->line)) { other = &lane; break; }
  }
  w.current = nullptr;
  if (!waiting) emu_fail(w, EMU_DIVERGENCE, "divergence: no lane can run");
  emu_fail(w, EMU_DIVERGENCE, "divergence: thread %u waits in %s (line %d) but thread %u of the same %s is at %s (line %d)",
           waiting->position.index_in_group, waiting->what, waiting->line, other ? other->position.index_in_group : 0,
           waiting->state == WAIT_GROUP ? "threadgroup" : "simdgroup", other ? state_text(*other) : "?",
           other && other->state != DONE ? other->line : 0);
}

static void switch_to(Worker& w, Lane& from, Lane* to) {
  if (to == &from) return;
  w.current = to;
  emu_switch(&from.sp, to->sp);
}

static void yield(Worker& w, Lane& from) {
  if (w.check) emu_flush(w);
  Lane* to = pick(w, from);
  if (!to) fail_divergence(w);
  switch_to(w, from, to);
}

static void lane_main() {
  Worker& w = *emu_self;
  Lane& lane = *w.current;
  w.run->config->entry(w.run->addresses, &lane.position);
  if (w.check) emu_flush(w);
  lane.state = DONE;
  w.groups[lane.position.simdgroup].runnable--;
  w.done++;
  if (w.done == w.lane_count) {
    w.current = nullptr;
    emu_switch(&lane.sp, w.home_sp);
  }
  Lane* to = pick(w, lane);
  if (!to) fail_divergence(w);
  switch_to(w, lane, to);
  __builtin_trap();
}

static inline void wait(Simdgroup& g, Lane& lane, LaneState state, const char* what, int line) {
  lane.state = state;
  lane.what = what;
  lane.line = line;
  g.runnable--;
}

static void release(Worker& w, Simdgroup& g, LaneState state) {
  for (uint32_t i = 0; i < g.count; ++i) {
    Lane& lane = w.lanes[g.first + i];
    if (lane.state == state) {
      lane.state = READY;
      g.runnable++;
    }
  }
}

static void arrive_simd(Worker& w, Lane& lane, const char* what, int line) {
  Simdgroup& g = w.groups[lane.position.simdgroup];
  if (g.arrived == 0) {
    g.what = what;
    g.line = line;
  } else if (g.line != line || strcmp(g.what, what) != 0) {
    emu_fail(w, EMU_DIVERGENCE, "divergence: this lane is in %s (line %d), others of its simdgroup in %s (line %d)", what, line,
             g.what, g.line);
  }
  g.arrived++;
}

extern "C" emu_exchange emu_simd(const void* value, uint32_t size, emu_reducer reducer, const char* what, int line) {
  Worker& w = *emu_self;
  Lane& lane = *w.current;
  Simdgroup& g = w.groups[lane.position.simdgroup];
  uint32_t parity = lane.exchanges++ & 1;  // two buffers: a lane may deposit for the next exchange before others read
  memcpy(g.slots[parity] + lane.position.lane * EMU_SLOT, value, size);
  arrive_simd(w, lane, what, line);
  wait(g, lane, WAIT_SIMD, what, line);
  if (g.arrived == g.count) {
    if (reducer) reducer(g.slots[parity], g.active, g.results[parity]);
    g.arrived = 0;
    release(w, g, WAIT_SIMD);
  }
  yield(w, lane);
  return emu_exchange{g.slots[parity], g.results[parity], g.active, lane.position.lane};
}

extern "C" void emu_simdgroup_barrier(uint32_t flags, int line) {
  Worker& w = *emu_self;
  Lane& lane = *w.current;
  Simdgroup& g = w.groups[lane.position.simdgroup];
  arrive_simd(w, lane, "simdgroup_barrier", line);
  if (g.arrived == 1) g.flags = flags;
  wait(g, lane, WAIT_SIMD, "simdgroup_barrier", line);
  if (g.arrived == g.count) {
    g.arrived = 0;
    if (w.check) emu_flush(w);
    if (g.flags & 1) g.epoch[SPACE_DEVICE]++;
    if (g.flags & 2) g.epoch[SPACE_THREADGROUP]++;
    release(w, g, WAIT_SIMD);
  }
  yield(w, lane);
}

extern "C" void emu_threadgroup_barrier(uint32_t flags, int line) {
  Worker& w = *emu_self;
  Lane& lane = *w.current;
  if (w.arrived == 0) {
    w.line = line;
    w.flags = flags;
  } else if (w.line != line) {
    emu_fail(w, EMU_DIVERGENCE, "divergence: this thread is in threadgroup_barrier (line %d), others in the one of line %d", line,
             w.line);
  }
  wait(w.groups[lane.position.simdgroup], lane, WAIT_GROUP, "threadgroup_barrier", line);
  if (++w.arrived == w.lane_count) {
    w.arrived = 0;
    if (w.check) emu_flush(w);
    if (w.flags & 1) w.epoch[SPACE_DEVICE]++;
    if (w.flags & 2) w.epoch[SPACE_THREADGROUP]++;
    for (uint32_t i = 0; i < w.group_count; ++i) release(w, w.groups[i], WAIT_GROUP);
  }
  yield(w, lane);
}

// -------------------------------------------------------------------------------------------------- threadgroup memory
extern "C" void* emu_threadgroup(uint32_t id, uint64_t bytes, uint32_t item, uint64_t align, const char* name) {
  Worker& w = *emu_self;
  if (id >= MAX_ARRAYS) emu_fail(w, EMU_SETUP, "more than %d threadgroup arrays", int(MAX_ARRAYS));
  Region& r = w.arrays[id];
  if (r.live && r.bytes == bytes) return r.base;
  uint64_t total = (w.threadgroup_bytes + align - 1) / align * align + bytes;
  if (total > 32768)
    emu_fail(w, EMU_THREADGROUP_MEMORY, "threadgroup memory: %llu bytes with '%s', the limit is 32768", (unsigned long long)total,
             name);
  w.threadgroup_bytes = total;
  if (!r.pages) r.map(32768);
  r.name = name;
  r.place(bytes, align > 16 ? align : 16, item, SPACE_THREADGROUP);
  r.live = true;
  r.poison();
  if (w.check) emu_shadow(r, false);
  return r.base;
}

// -------------------------------------------------------------------------------------------------------------- memory
static const size_t PAGE = 4096, GUARD = size_t(1) << 20;

void Region::map(uint64_t capacity) {
  page_bytes = (capacity + 64 + PAGE - 1) / PAGE * PAGE;
  char* all = static_cast<char*>(mmap(nullptr, page_bytes + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (all == MAP_FAILED) abort();
  pages = all + GUARD;
  if (mprotect(pages, page_bytes, PROT_READ | PROT_WRITE)) abort();
}

void Region::unmap() {
  if (pages) munmap(pages - GUARD, page_bytes + 2 * GUARD);
  free(cells);
  pages = nullptr;
  cells = nullptr;
}

// The end of the data touches the guard page, as closely as the alignment of the base allows.
void Region::place(uint64_t size, uint64_t align, uint32_t element, Space where) {
  bytes = size;
  item = element;
  space = where;
  base = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(pages) + page_bytes - size) & ~uintptr_t(align - 1));
}

void Region::poison() { memset(pages, 0xFF, page_bytes); }

// First byte outside the data that is not poison any more, as an offset from the base; INT64_MAX when all is well.
int64_t Region::spoilt() const {
  for (const char* p = pages; p < base; ++p)
    if (*p != char(0xFF)) return p - base;
  for (const char* p = base + bytes; p < pages + page_bytes; ++p)
    if (*p != char(0xFF)) return p - base;
  return INT64_MAX;
}

static bool in_span(const Region& r, const char* a) { return r.pages && a >= r.pages - GUARD && a < r.pages + r.page_bytes + GUARD; }

const Region* emu_find(Worker& w, const char* a) {
  for (uint32_t i = 0; i < w.run->region_count; ++i)
    if (in_span(w.run->regions[i], a)) return &w.run->regions[i];
  for (uint32_t i = 0; i < MAX_ARRAYS; ++i)
    if (w.arrays[i].live && in_span(w.arrays[i], a)) return &w.arrays[i];
  return nullptr;
}

// ------------------------------------------------------------------------------------------------------------- signals
static const int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction old_faults[4], old_time;
static int time_signal() { return SIGRTMIN + 7; }

static void on_fault(int signal, siginfo_t* info, void* context) {
  Worker* w = emu_self;
  if (!w || !w->inside) {  // not ours: put the previous handlers back and let the instruction fault again
    for (int i = 0; i < 4; ++i) sigaction(FAULTS[i], &old_faults[i], nullptr);
    return;
  }
  w->inside = false;
  if (signal == SIGFPE) emu_fail(*w, EMU_TRAP, "integer division by zero (or overflow of a division)");
  if (signal == SIGILL) emu_fail(*w, EMU_TRAP, "the kernel reached a trap (unreachable code)");
  const char* access = "access";
#if defined(__x86_64__)
  access = (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) ? "write" : "read";
#else
  (void)context;
#endif
  const char* a = static_cast<const char*>(info->si_addr);
  if (a >= w->stacks && a < w->stacks + w->stack_span)
    emu_fail(*w, EMU_STACK, "a fiber's stack of %d KB is used up: large local arrays or endless recursion", int(STACK / 1024));
  if (const Region* r = emu_find(*w, a)) {
    if (a >= r->base && a < r->base + r->bytes)
      emu_fail(*w, EMU_OUT_OF_BOUNDS, "write to the read-only input '%s' at byte %lld", r->name, (long long)(a - r->base));
    emu_fail(*w, EMU_OUT_OF_BOUNDS, "out-of-bounds %s of '%s': byte %lld, it has %llu bytes (%llu elements)", access, r->name,
             (long long)(a - r->base), (unsigned long long)r->bytes, (unsigned long long)(r->bytes / r->item));
  }
  emu_fail(*w, EMU_OUT_OF_BOUNDS, "out-of-bounds %s: address %p is far from every buffer", access, static_cast<const void*>(a));
}

static void on_time(int, siginfo_t*, void*) {
  Worker* w = emu_self;
  if (!w || !w->inside) return;
  w->inside = false;
  emu_fail(*w, EMU_TIME, "still running after %.1f s of CPU time: an infinite loop?", w->run->config->cpu_seconds);
}

static void install_handlers() {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  action.sa_sigaction = on_fault;
  for (int i = 0; i < 4; ++i) sigaction(FAULTS[i], &action, &old_faults[i]);
  action.sa_sigaction = on_time;
  sigaction(time_signal(), &action, &old_time);
}

static void restore_handlers() {
  for (int i = 0; i < 4; ++i) sigaction(FAULTS[i], &old_faults[i], nullptr);
  sigaction(time_signal(), &old_time, nullptr);
}

// ------------------------------------------------------------------------------------------------------------- workers
static void make_worker(Worker& w) {
  if (w.stacks) return;
  w.stack_span = size_t(MAX_LANES) * STACK;
  w.stacks = static_cast<char*>(mmap(nullptr, w.stack_span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (w.stacks == MAP_FAILED) abort();
  w.lanes = new Lane[MAX_LANES]();
  w.groups = new Simdgroup[MAX_LANES / 32]();
}

static void grow_stacks(Worker& w, uint32_t lanes) {
  for (; w.stacks_ready < lanes; ++w.stacks_ready)
    if (mprotect(w.stacks + size_t(w.stacks_ready) * STACK + PAGE, STACK - PAGE, PROT_READ | PROT_WRITE)) abort();
}

static void set_up_group(Worker& w, const uint32_t at[3]) {
  const emu_launch& c = *w.run->config;
  uint32_t size[3], groups[3];
  for (int d = 0; d < 3; ++d) {
    groups[d] = (c.grid[d] + c.group[d] - 1) / c.group[d];
    uint32_t left = c.grid[d] - at[d] * c.group[d];  // threadgroups at the edge are smaller: MLX dispatches threads
    size[d] = left < c.group[d] ? left : c.group[d];
  }
  w.lane_count = size[0] * size[1] * size[2];
  w.group_count = (w.lane_count + 31) / 32;
  w.done = w.arrived = 0;
  w.threadgroup_bytes = 0;
  w.epoch[0] = w.epoch[1] = 0;
  w.group_index = at[0] + groups[0] * (at[1] + groups[1] * at[2]);
  w.random = (c.seed * 0x9E3779B97F4A7C15ull + w.group_index * 0xD1B54A32D192ED03ull) | 1;
  for (int i = 0; i < 3; ++i) next_random(w);
  for (uint32_t i = 0; i < MAX_ARRAYS; ++i) w.arrays[i].live = false;
  grow_stacks(w, w.lane_count);
  for (uint32_t s = 0; s < w.group_count; ++s) {
    Simdgroup& g = w.groups[s];
    g.first = s * 32;
    g.count = w.lane_count - g.first < 32 ? w.lane_count - g.first : 32;
    g.active = g.count == 32 ? 0xFFFFFFFFu : (1u << g.count) - 1;
    g.runnable = g.count;
    g.arrived = 0;
    g.epoch[0] = g.epoch[1] = 0;
    memset(g.slots, 0xFF, sizeof g.slots);
    for (uint32_t i = 0; i < g.count; ++i) g.order[i] = g.first + (c.schedule == 1 ? g.count - 1 - i : i);
    if (c.schedule == 2) shuffle(w, g.order, g.count);
    for (uint32_t i = 0; i < g.count; ++i) w.lanes[g.order[i]].rank = i;
    w.group_order[s] = c.schedule == 1 ? w.group_count - 1 - s : s;
  }
  if (c.schedule == 2) shuffle(w, w.group_order, w.group_count);
  for (uint32_t s = 0; s < w.group_count; ++s) w.groups[w.group_order[s]].rank = s;
  for (uint32_t i = 0; i < w.lane_count; ++i) {
    Lane& lane = w.lanes[i];
    emu_position& p = lane.position;
    uint32_t inside[3] = {i % size[0], i / size[0] % size[1], i / size[0] / size[1]};
    for (int d = 0; d < 3; ++d) {
      p.position_in_group[d] = inside[d];
      p.position_in_grid[d] = at[d] * c.group[d] + inside[d];
      p.group_in_grid[d] = at[d];
      p.threads_per_group[d] = size[d];
      p.dispatched_threads_per_group[d] = c.group[d];
      p.groups_per_grid[d] = groups[d];
      p.threads_per_grid[d] = c.grid[d];
    }
    p.index_in_group = i;
    p.lane = i % 32;
    p.simdgroup = i / 32;
    p.simdgroups = w.group_count;
    p.dispatched_simdgroups = (c.group[0] * c.group[1] * c.group[2] + 31) / 32;
    lane.state = READY;
    lane.exchanges = 0;
    prepare_stack(lane, w.stacks + size_t(i + 1) * STACK);
  }
}

static void check_canaries(Worker& w) {
  for (uint32_t i = 0; i < MAX_ARRAYS; ++i) {
    Region& r = w.arrays[i];
    if (!r.live) continue;
    int64_t at = r.spoilt();
    if (at != INT64_MAX)
      emu_fail(w, EMU_OUT_OF_BOUNDS, "out-of-bounds write of threadgroup array '%s': byte %lld, it has %llu bytes", r.name, (long long)at,
               (unsigned long long)r.bytes);
  }
}

static void run_group(Worker& w, uint64_t index) {
  const emu_launch& c = *w.run->config;
  uint32_t gx = (c.grid[0] + c.group[0] - 1) / c.group[0], gy = (c.grid[1] + c.group[1] - 1) / c.group[1];
  uint32_t at[3] = {uint32_t(index % gx), uint32_t(index / gx % gy), uint32_t(index / gx / gy)};
  set_up_group(w, at);
  Lane& first = w.lanes[w.groups[w.group_order[0]].order[0]];
  w.current = &first;
  w.inside = true;
  emu_switch(&w.home_sp, first.sp);
  w.inside = false;
  check_canaries(w);
  if (w.threadgroup_bytes > w.max_threadgroup_bytes) w.max_threadgroup_bytes = w.threadgroup_bytes;
}

static void* worker_main(void* argument) {
  Worker& w = *static_cast<Worker*>(argument);
  static const size_t ALT = 65536;
  stack_t alt = {malloc(ALT), 0, ALT};
  sigaltstack(&alt, nullptr);
  emu_self = &w;
  Launch& run = *w.run;
  if (sigsetjmp(w.home, 1) == 0) {
    while (!__atomic_load_n(&run.stop, __ATOMIC_ACQUIRE)) {
      uint64_t next = __atomic_fetch_add(&run.next, 1, __ATOMIC_RELAXED);
      if (next >= run.total) break;
      run_group(w, run.config->schedule == 1 ? run.total - 1 - next : next);
    }
  }
  w.inside = false;
  w.current = nullptr;
  emu_self = nullptr;
  stack_t off = {nullptr, SS_DISABLE, 0};
  sigaltstack(&off, nullptr);
  free(alt.ss_sp);
  pthread_mutex_lock(&run.mutex);
  w.finished = true;
  run.finished++;
  pthread_cond_signal(&run.condition);
  pthread_mutex_unlock(&run.mutex);
  return nullptr;
}

static double cpu_seconds(pthread_t thread) {
  clockid_t clock;
  struct timespec t;
  if (pthread_getcpuclockid(thread, &clock) || clock_gettime(clock, &t)) return 0;
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

static void wait_for_workers(Launch& run, Worker* workers, uint32_t count) {
  pthread_mutex_lock(&run.mutex);
  while (run.finished < count) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += 20 * 1000 * 1000;
    if (t.tv_nsec >= 1000000000) { t.tv_nsec -= 1000000000; t.tv_sec++; }
    pthread_cond_timedwait(&run.condition, &run.mutex, &t);
    for (uint32_t i = 0; i < count; ++i)
      if (!workers[i].finished && cpu_seconds(workers[i].thread) > run.config->cpu_seconds) {
        pthread_mutex_unlock(&run.mutex);  // the handler takes it
        pthread_kill(workers[i].thread, time_signal());
        usleep(1000);
        pthread_mutex_lock(&run.mutex);
      }
  }
  pthread_mutex_unlock(&run.mutex);
}

static void finish_buffers(Launch& run) {
  emu_launch& c = *run.config;
  for (uint32_t i = 0; i < c.buffer_count; ++i) {
    emu_buffer& b = c.buffers[i];
    Region& r = run.regions[i];
    if (b.kind == EMU_OUTPUT) {
      memcpy(b.data, r.base, b.bytes);
      int64_t at = r.spoilt();
      if (at != INT64_MAX && c.error == EMU_OK) {
        c.error = EMU_OUT_OF_BOUNDS;
        snprintf(c.message, sizeof c.message, "out-of-bounds write of '%s': byte %lld, it has %llu bytes (%llu elements)", b.name,
                 (long long)at, (unsigned long long)b.bytes, (unsigned long long)(b.bytes / b.item));
      }
      if (c.check) emu_count_unwritten(r, b);
    }
    r.unmap();
  }
}

extern "C" int emu_run(emu_launch* config) {
  static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
  static Worker pool[MAX_WORKERS];
  pthread_mutex_lock(&one_at_a_time);
  Launch run;
  run.config = config;
  config->error = EMU_OK;
  config->message[0] = 0;
  run.region_count = config->buffer_count;
  for (uint32_t i = 0; i < config->buffer_count; ++i) {
    emu_buffer& b = config->buffers[i];
    Region& r = run.regions[i];
    r.name = b.name;
    r.map(b.bytes);
    r.poison();
    r.place(b.bytes, 16, b.item, SPACE_DEVICE);
    memcpy(r.base, b.data, b.bytes);
    if (config->check) emu_shadow(r, b.kind == EMU_INPUT || b.initialised);
    if (b.kind == EMU_INPUT) mprotect(r.pages, r.page_bytes, PROT_READ);
    run.addresses[i] = r.base;
  }
  run.total = 1;
  for (int d = 0; d < 3; ++d) run.total *= (config->grid[d] + config->group[d] - 1) / config->group[d];
  uint32_t count = config->check ? 1 : config->workers;
  if (count > MAX_WORKERS) count = MAX_WORKERS;
  if (count > run.total) count = run.total ? uint32_t(run.total) : 1;
  install_handlers();
  for (uint32_t i = 0; i < count; ++i) {
    Worker& w = pool[i];
    make_worker(w);
    w.run = &run;
    w.check = config->check;
    w.finished = w.inside = false;
    w.max_threadgroup_bytes = 0;
    w.benign = 0;
    w.pending.bytes = 0;
    pthread_create(&w.thread, nullptr, worker_main, &w);
  }
  wait_for_workers(run, pool, count);
  for (uint32_t i = 0; i < count; ++i) pthread_join(pool[i].thread, nullptr);
  restore_handlers();
  config->threadgroup_bytes = 0;
  config->benign_races = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (pool[i].max_threadgroup_bytes > config->threadgroup_bytes) config->threadgroup_bytes = uint32_t(pool[i].max_threadgroup_bytes);
    config->benign_races += pool[i].benign;
  }
  finish_buffers(run);
  pthread_mutex_unlock(&one_at_a_time);
  return int(config->error);
}
