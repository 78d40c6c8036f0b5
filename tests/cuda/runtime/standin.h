/* What the parts of the stand-in share, and what a test may set and ask.

   The stand-in takes the place of a card: the unmodified CUDA build of torch starts on it. Device memory is host memory
   below a capacity, copies are real, kernels do nothing. All sizes are bytes. The ledger has one lock, held for no
   longer than it takes to count; no function here calls out while holding it. */

#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>

enum standin_counter {
    STANDIN_MALLOCS,
    STANDIN_FREES,
    STANDIN_OOMS,
    STANDIN_LAUNCHES,
    STANDIN_SYNCS,
    STANDIN_COUNTERS
};

/* One process that is not this one and holds device memory; process id 0: it holds memory, and NVML cannot name it. */
struct standin_foreign {
    unsigned pid;
    size_t bytes;
    char name[256];
};

/* For tests, through ctypes. */
void standin_set_capacity(size_t bytes);
size_t standin_capacity(void);
size_t standin_used(void);
void standin_set_foreign(unsigned pid, size_t bytes, const char *name);
void standin_set_malloc_delay_us(long microseconds);
void standin_pretend_capture(int on);
long standin_count(enum standin_counter counter);

/* For the parts. */
#define STANDIN_NAME "Stand-in GPU"
#define STANDIN_PCI_BUS_ID "0000:00:00.0"
extern const unsigned char standin_uuid[16];

int standin_usable(void); /* 0 in a forked child */
struct standin_foreign standin_foreign(void);
size_t standin_free_bytes(void);
size_t standin_peak(void);
void standin_reset_peak(void);
int standin_take(size_t bytes); /* counts an allocation; 0 when it passes the capacity */
void standin_give(size_t bytes);
void standin_counted(enum standin_counter counter);

#endif
