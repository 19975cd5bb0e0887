/* Runs one kernel of AMDGPU LLVM IR that was compiled for this processor instead.
 *
 * Each thread of a block is a coroutine. It runs until it comes to a barrier, an exchange between
 * lanes or a matrix instruction, and goes on when all that take part have come. Blocks of even
 * number start their threads from the first, odd ones from the last, so that a missing barrier shows
 * as wrong results.
 */

#undef _FORTIFY_SOURCE
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { READY, AT_BARRIER, AT_EXCHANGE, AT_MATRIX, DONE };
enum { MFMA_F16, MFMA_BF16, WMMA_F16, WMMA_BF16, WMMA12_F16, WMMA12_BF16 };
enum { STACK = 256 * 1024, MOST = 1024, TILE = 16 };

typedef struct {
  jmp_buf at;
  int fresh, state, number, kind;
  uint32_t value, from;
  const uint16_t *a, *b;
  float *c;
} Thread;

static Thread threads[MOST];
static Thread *current;
static jmp_buf scheduler;
static char *stacks;
static int block_index[3];
static void (*entry)(const void *);
static const void *parameters;
static char message[256];

static int fault(const char *text) {
  snprintf(message, sizeof message, "%s in block %d, %d", text, block_index[0], block_index[1]);
  return -1;
}

/* --- what kernels call --- */

static void wait_at(int state) {
  current->state = state;
  if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}

int32_t rudnn_emulated_thread(void) { return current->number; }
int32_t rudnn_emulated_block(int32_t axis) { return block_index[axis]; }
void rudnn_emulated_barrier(void) { wait_at(AT_BARRIER); }

int32_t rudnn_emulated_permute(int32_t address, int32_t value) {
  Thread *me = current;
  me->from = (uint32_t)address >> 2;
  me->value = (uint32_t)value;
  wait_at(AT_EXCHANGE);
  return (int32_t)me->value;
}

void rudnn_emulated_matrix(int32_t kind, const void *a, const void *b, void *c) {
  current->kind = kind;
  current->a = a;
  current->b = b;
  current->c = c;
  wait_at(AT_MATRIX);
}

void rudnn_emulated_poison(void *at, int64_t nbytes) { memset(at, 0xff, (size_t)nbytes); }

/* --- lanes together --- */

static float half_value(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, rest = bits & 1023;
  uint32_t whole = sign;
  float value;
  if (exponent == 0) {
    value = (float)rest / 16777216.0f;
    return sign ? -value : value;
  }
  whole |= exponent == 31 ? 0x7f800000 | rest << 13 : (exponent + 112) << 23 | rest << 13;
  memcpy(&value, &whole, 4);
  return value;
}

static float bfloat_value(uint16_t bits) {
  uint32_t whole = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &whole, 4);
  return value;
}

static void exchange(Thread *wave, int lanes) {
  uint32_t given[64];
  for (int i = 0; i < lanes; ++i) given[i] = wave[i].value;
  for (int i = 0; i < lanes; ++i) {
    uint32_t from = wave[i].from % (uint32_t)lanes;
    wave[i].value = given[from];
  }
}

/* D = A.B + C, by AMD's matrix instruction calculator: where element i of lane l lies. */
static int multiply(Thread *wave, int lanes) {
  float a[TILE][TILE], b[TILE][TILE];
  int kind = wave[0].kind, gfx11 = kind == WMMA_F16 || kind == WMMA_BF16;
  int mfma = kind == MFMA_F16 || kind == MFMA_BF16, bfloat = kind & 1;
  int held = mfma ? 4 : gfx11 ? 16 : 8, results = mfma ? 4 : 8;
  if (lanes != (mfma ? 64 : 32)) return fault("a matrix instruction in part of a wavefront");
  for (int l = 0; l < lanes; ++l) {
    if (wave[l].kind != kind) return fault("different matrix instructions in one wavefront");
    for (int i = 0; i < held; ++i) {
      int k = gfx11 ? i : l / 16 * held + i;
      float x = bfloat ? bfloat_value(wave[l].a[i]) : half_value(wave[l].a[i]);
      float y = bfloat ? bfloat_value(wave[l].b[i]) : half_value(wave[l].b[i]);
      if (gfx11 && l >= 16 && (memcmp(&a[l % 16][k], &x, 4) || memcmp(&b[k][l % 16], &y, 4)))
        return fault("halves of a wavefront that differ where a matrix instruction wants copies");
      a[l % 16][k] = x;
      b[k][l % 16] = y;
    }
  }
  for (int l = 0; l < lanes; ++l)
    for (int i = 0; i < results; ++i) {
      int row = gfx11 ? 2 * i + l / 16 : l / 16 * results + i;
      double sum = wave[l].c[i];
      for (int k = 0; k < TILE; ++k) sum += (double)a[row][k] * b[k][l % 16];
      wave[l].c[i] = (float)sum;
    }
  return 0;
}

/* What the lanes of a wavefront wait for, if it is each other: 1 if they go on. */
static int together(Thread *wave, int lanes) {
  int state = wave[0].state, some = 0;
  for (int i = 0; i < lanes; ++i) {
    some |= wave[i].state == AT_EXCHANGE || wave[i].state == AT_MATRIX;
    if (wave[i].state != state) state = -1;
  }
  if (!some) return 0;
  if (state < 0) return fault("lanes of a wavefront that part before they exchange values");
  if (state == AT_EXCHANGE) exchange(wave, lanes);
  if (state == AT_MATRIX && multiply(wave, lanes)) return -1;
  for (int i = 0; i < lanes; ++i) wave[i].state = READY;
  return 1;
}

/* --- scheduling --- */

static void begin(void) {
  entry(parameters);
  current->state = DONE;
  _longjmp(scheduler, 1);
}

static void resume(Thread *thread) {
  current = thread;
  if (_setjmp(scheduler)) return;
  if (!thread->fresh) _longjmp(thread->at, 1);
  thread->fresh = 0;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack.ss_sp = stacks + (size_t)thread->number * STACK;
  start.uc_stack.ss_size = STACK;
  start.uc_link = NULL;
  makecontext(&start, begin, 0);
  setcontext(&start);
}

static int run_block(int count, int wave) {
  int backwards = (block_index[0] + block_index[1]) & 1;
  memset(threads, 0, sizeof(Thread) * (size_t)count);
  for (int i = 0; i < count; ++i) {
    threads[i].number = i;
    threads[i].fresh = 1;
  }
  for (;;) {
    int done = 0, waiting = 0, went_on = 0;
    for (int i = 0; i < count; ++i) {
      Thread *thread = &threads[backwards ? count - 1 - i : i];
      if (thread->state == READY) resume(thread);
    }
    for (int i = 0; i < count; i += wave) {
      int moved = together(&threads[i], count - i < wave ? count - i : wave);
      if (moved < 0) return -1;
      went_on |= moved;
    }
    for (int i = 0; i < count; ++i) {
      done += threads[i].state == DONE;
      waiting += threads[i].state == AT_BARRIER;
    }
    if (done == count) return 0;
    if (waiting == count) {
      for (int i = 0; i < count; ++i) threads[i].state = READY;
    } else if (!went_on) {
      return fault("threads that do not come to the barrier others wait at");
    }
  }
}

/* Run a grid of x times y blocks; `poison` spoils shared memory. NULL, or what went wrong. */
const char *rudnn_emulate(void (*kernel)(const void *), void (*poison)(void), int32_t wave,
                          uint32_t x, uint32_t y, int32_t count, const void *packed) {
  if (count < 1 || count > MOST) return "a number of threads that no block has";
  /* Not kept: every kernel's library has stacks of its own, and a fork copies all there are. */
  stacks = malloc((size_t)count * STACK);
  if (!stacks) return "no memory for stacks";
  entry = kernel;
  parameters = packed;
  const char *wrong = NULL;
  for (uint32_t j = 0; j < y && !wrong; ++j)
    for (uint32_t i = 0; i < x && !wrong; ++i) {
      block_index[0] = (int)i;
      block_index[1] = (int)j;
      poison();
      if (run_block(count, wave)) wrong = message;
    }
  free(stacks);
  return wrong;
}
