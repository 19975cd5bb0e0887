/* Blocks of threads as fibers, which run in turn until each waits for others or ends. */
#include "fibers.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

namespace rudnn {
namespace {
enum State { READY, BARRIER, EXCHANGE, DONE };
enum { WARP = 32, MOST = 1024, STACK = 256 * 1024 };
struct Copy {
  void *to;
  const void *from;
  size_t size;
};
struct Fiber {
  ucontext_t start;
  jmp_buf here; /* once begun; a switch by ucontext takes system calls, a jump none */
  bool begun;
  State state;
  Exchange kind; /* of exchange that it waits at */
  unsigned mask;
  std::vector<std::vector<Copy>> copies; /* in groups, the newest last and still open */
};

Fiber fibers[MOST];
Deposit given[MOST], taken[MOST];
char *stacks;
jmp_buf scheduler;
Fiber *current;
unsigned block_threads;
const char *failure;
void (*kernel)(const void *);
const void *arguments;

void wait(State state) {
  current->state = state;
  if (!_setjmp(current->here)) _longjmp(scheduler, 1);
}

/* A thread of each block in turn. */
void work() {
  while (true) {
    kernel(arguments);
    for (auto &group : current->copies)
      if (!group.empty()) fail("a thread ends before its copies have arrived");
    wait(DONE);
  }
}

void resume(unsigned index) {
  current = &fibers[index];
  threadIdx = {index, 0, 0};
  if (_setjmp(scheduler)) return;
  if (current->begun) _longjmp(current->here, 1);
  current->begun = true;
  setcontext(&current->start);
}

void prepare(unsigned index) {
  Fiber &fiber = fibers[index];
  fiber.begun = false;
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = stacks + (size_t)index * STACK;
  fiber.start.uc_stack.ss_size = STACK;
  fiber.start.uc_link = NULL;
  makecontext(&fiber.start, work, 0);
}

/* Lets an exchange of a warp happen if all of its lanes that still run have come; whether it did.
 */
bool release_exchange(unsigned first) {
  unsigned end = std::min<unsigned>(first + WARP, block_threads);
  for (unsigned i = first; i < end; ++i) {
    if (fibers[i].state != EXCHANGE) continue;
    unsigned mask = fibers[i].mask;
    bool all = true;
    for (unsigned j = first; j < end; ++j) {
      const Fiber &other = fibers[j];
      if (!(mask >> (j - first) & 1) || other.state == DONE) continue;
      all &= other.state == EXCHANGE && other.kind == fibers[i].kind;
      if (all && other.mask != mask) failure = "lanes of one exchange name different masks";
    }
    if (!all) continue;
    for (unsigned j = first; j < first + WARP; ++j) {
      if (!(mask >> (j - first) & 1)) continue;
      taken[j].there = j < end && fibers[j].state != DONE;
      if (taken[j].there) {
        memcpy(taken[j].words, given[j].words, sizeof given[j].words);
        fibers[j].state = READY;
      } else {
        memset(taken[j].words, 0xFF, sizeof taken[j].words);
      }
    }
    return true;
  }
  return false;
}

/* Lets those go on who wait, where all have come that must; whether any can. */
bool release() {
  bool moved = false;
  unsigned done = 0, waiting = 0;
  for (unsigned first = 0; first < block_threads; first += WARP)
    while (release_exchange(first)) moved = true;
  for (unsigned i = 0; i < block_threads; ++i) {
    done += fibers[i].state == DONE;
    waiting += fibers[i].state == BARRIER;
  }
  if (!waiting || done + waiting < block_threads) return moved;
  for (unsigned i = 0; i < block_threads; ++i)
    if (fibers[i].state == BARRIER) fibers[i].state = READY;
  return true;
}

bool ended() {
  return std::all_of(fibers, fibers + block_threads, [](Fiber &f) { return f.state == DONE; });
}

void run_block(bool backwards) {
  for (unsigned i = 0; i < block_threads; ++i) {
    fibers[i].state = READY;
    fibers[i].copies.assign(1, {});
  }
  while (true) {
    for (unsigned n = 0; n < block_threads && !failure; ++n) {
      unsigned index = backwards ? block_threads - 1 - n : n;
      if (fibers[index].state == READY) resume(index);
    }
    if (failure || ended()) return;
    if (!release())
      failure = "threads wait for others that never come: a barrier or an exchange in a branch";
  }
}
}  // namespace

uint3 threadIdx, blockIdx;

const char *run(void (*body)(const void *), const void *data, const unsigned *grid,
                unsigned threads, char *shared, size_t shared_bytes) {
  bool backwards = getenv("STUB_BACKWARDS") != NULL;
  stacks = (char *)malloc((size_t)threads * STACK);
  kernel = body;
  arguments = data;
  block_threads = threads;
  failure = NULL;
  for (unsigned i = 0; i < threads; ++i) prepare(i);
  for (unsigned z = 0; z < grid[2]; ++z)
    for (unsigned y = 0; y < grid[1]; ++y)
      for (unsigned x = 0; x < grid[0]; ++x) {
        blockIdx = {x, y, z};
        memset(shared, 0xFF, shared_bytes);
        if (!failure) run_block(backwards);
      }
  free(stacks);
  return failure;
}

void barrier() { wait(BARRIER); }

const Deposit *exchange(Exchange kind, unsigned mask, const void *words, size_t size) {
  unsigned lane = threadIdx.x % WARP, first = threadIdx.x - lane;
  Deposit &mine = given[threadIdx.x];
  memset(&mine, 0, sizeof mine);
  memcpy(mine.words, words, size);
  if (!(mask >> lane & 1)) fail("a lane that its own mask does not name");
  current->kind = kind;
  current->mask = mask;
  wait(EXCHANGE);
  return taken + first;
}

unsigned running() {
  unsigned first = threadIdx.x / WARP * WARP, mask = 0;
  for (unsigned i = 0; i < WARP && first + i < block_threads; ++i)
    mask |= (unsigned)(fibers[first + i].state != DONE) << i;
  return mask;
}

void fail(const char *what) {
  failure = what;
  _longjmp(scheduler, 1);
}

void copy_later(void *to, const void *from, size_t size) {
  current->copies.back().push_back({to, from, size});
}
void close_copies() { current->copies.emplace_back(); }
void await_copies(size_t left) {
  auto &groups = current->copies;
  for (size_t i = 0; i + 1 + left < groups.size(); ++i) {
    for (const Copy &copy : groups[i]) memcpy(copy.to, copy.from, copy.size);
    groups[i].clear();
  }
}
}  // namespace rudnn
