/* What kernels need of fibers.cc. */
#ifndef RUDNN_FIBERS
#define RUDNN_FIBERS
#include <stddef.h>
#include <stdint.h>

struct uint3 { unsigned x, y, z; };

namespace rudnn {
enum Exchange { SYNC, SHUFFLE, SHUFFLE_DOWN, MATRICES, PRODUCT };
struct Deposit { bool there; uint64_t words[4]; };

extern uint3 threadIdx, blockIdx; /* of the fiber that runs */

/* Run `body` in every thread of every block; what was wrong, or NULL. */
const char *run(void (*body)(const void *), const void *data, const unsigned *grid,
                unsigned threads, char *shared, size_t shared_bytes);
void barrier();
/* Every lane of `mask` gives `size` bytes; then each sees what all lanes of its warp gave. */
const Deposit *exchange(Exchange kind, unsigned mask, const void *words, size_t size);
/* The lanes of this warp that have not ended. */
unsigned running();
/* End the launch. */
void fail(const char *what);
/* A copy that happens when its group, closed after it, is waited for: all but the newest `left`. */
void copy_later(void *to, const void *from, size_t size);
void close_copies();
void await_copies(size_t left);
}  // namespace rudnn
#endif
