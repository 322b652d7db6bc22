/* Counts the bytes that PyTorch's CPU allocator has: loaded before the C library, it sees every block come and go.

   Only blocks that are asked for from a given range of code count, so that those of other libraries do not. Sizes are as
   requested. Nothing here knows PyTorch: the range is set by whoever wants to measure. */

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

#define SLOTS (1u << 20)

static struct {
  uintptr_t block;
  size_t size;
} table[SLOTS];
static uintptr_t code_start, code_end;
static int64_t now, peak;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static uint32_t home(uintptr_t block) { return (uint32_t)((block >> 6) * 0x9E3779B97F4A7C15ull >> 44) & (SLOTS - 1); }

static void add(uintptr_t block, size_t size) {
  uint32_t slot = home(block);
  while (table[slot].block && table[slot].block != block)
    slot = (slot + 1) & (SLOTS - 1);
  now -= table[slot].block ? (int64_t)table[slot].size : 0;
  table[slot].block = block;
  table[slot].size = size;
  now += (int64_t)size;
  peak = now > peak ? now : peak;
}

static void drop(uintptr_t block) {
  uint32_t slot = home(block);
  while (table[slot].block != block) {
    if (!table[slot].block)
      return;
    slot = (slot + 1) & (SLOTS - 1);
  }
  now -= (int64_t)table[slot].size;
  /* Close the gap, so that a search never stops before what it looks for. */
  for (uint32_t next = (slot + 1) & (SLOTS - 1); table[next].block; next = (next + 1) & (SLOTS - 1)) {
    uint32_t distance = (next - home(table[next].block)) & (SLOTS - 1);
    if (distance >= ((next - slot) & (SLOTS - 1))) {
      table[slot] = table[next];
      slot = next;
    }
  }
  table[slot].block = 0;
}

int posix_memalign(void **block, size_t alignment, size_t size) {
  uintptr_t caller = (uintptr_t)__builtin_return_address(0);
  void *found = __libc_memalign(alignment, size);
  if (!found)
    return ENOMEM;
  *block = found;
  if (caller >= code_start && caller < code_end) {
    pthread_mutex_lock(&lock);
    add((uintptr_t)found, size);
    pthread_mutex_unlock(&lock);
  }
  return 0;
}

void free(void *block) {
  /* PyTorch's blocks begin at multiples of 64 bytes. */
  if (code_end && block && !((uintptr_t)block & 63)) {
    pthread_mutex_lock(&lock);
    drop((uintptr_t)block);
    pthread_mutex_unlock(&lock);
  }
  __libc_free(block);
}

void allocator_meter_watch(uintptr_t start, uintptr_t end) {
  code_start = start;
  code_end = end;
}

int64_t allocator_meter_now(void) { return now; }
int64_t allocator_meter_peak(void) { return peak; }

void allocator_meter_restart(void) {
  pthread_mutex_lock(&lock);
  peak = now;
  pthread_mutex_unlock(&lock);
}
