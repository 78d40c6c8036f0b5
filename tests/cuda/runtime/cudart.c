/* The CUDA runtime of the stand-in, first part: errors, the ledger, the device and its memory. Preloaded, so that its
   symbols are found before those of libcudart; what is missing here goes to the real library and fails there, since
   that finds no driver. */

#define _GNU_SOURCE
#include "standin.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* ------------------------------------------------------------------------------------------------------- errors */

static __thread cudaError_t last_error = cudaSuccess;
static int forked; /* a child of a process that has used CUDA cannot use it */

int standin_usable(void) { return !forked; }

static cudaError_t result(cudaError_t error) {
    if (forked) error = cudaErrorInitializationError;
    if (error != cudaSuccess) last_error = error;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

/* ------------------------------------------------------------------------------------------------------- ledger */

static pthread_mutex_t ledger = PTHREAD_MUTEX_INITIALIZER;
static size_t capacity = 256u << 20, used, peak;
static struct standin_foreign foreign;
static atomic_long counters[STANDIN_COUNTERS];
static atomic_long malloc_delay_us;

const unsigned char standin_uuid[16] = {0x5a, 0x17, 0xd1, 0x00, 0x5a, 0x17, 0xd1, 0x00,
                                        0x5a, 0x17, 0xd1, 0x00, 0x5a, 0x17, 0xd1, 0x00};

static void lock(void) { pthread_mutex_lock(&ledger); }
static void unlock(void) { pthread_mutex_unlock(&ledger); }

static void in_forked_child(void) {
    forked = 1;
    unlock();
}

__attribute__((constructor)) static void start(void) {
    const char *bytes = getenv("STANDIN_CAPACITY");
    if (bytes) capacity = strtoull(bytes, NULL, 10);
    pthread_atfork(lock, unlock, in_forked_child);
}

void standin_counted(enum standin_counter counter) { atomic_fetch_add(&counters[counter], 1); }
long standin_count(enum standin_counter counter) { return atomic_load(&counters[counter]); }
void standin_set_malloc_delay_us(long microseconds) { atomic_store(&malloc_delay_us, microseconds); }
size_t standin_used(void) { return used; }
size_t standin_capacity(void) { return capacity; }
size_t standin_peak(void) { return peak; }

void standin_reset_peak(void) {
    lock();
    peak = used;
    unlock();
}

void standin_set_capacity(size_t bytes) {
    lock();
    capacity = bytes;
    unlock();
}

void standin_set_foreign(unsigned pid, size_t bytes, const char *name) {
    lock();
    foreign.pid = pid;
    foreign.bytes = bytes;
    snprintf(foreign.name, sizeof foreign.name, "%s", name);
    unlock();
}

struct standin_foreign standin_foreign(void) {
    lock();
    struct standin_foreign copy = foreign;
    unlock();
    return copy;
}

static size_t free_bytes(void) { return capacity > used + foreign.bytes ? capacity - used - foreign.bytes : 0; }

size_t standin_free_bytes(void) {
    lock();
    size_t bytes = free_bytes();
    unlock();
    return bytes;
}

int standin_take(size_t bytes) {
    long delay_us = atomic_load(&malloc_delay_us);
    if (delay_us) {
        struct timespec delay = {delay_us / 1000000, delay_us % 1000000 * 1000};
        nanosleep(&delay, NULL);
    }
    standin_counted(STANDIN_MALLOCS);
    lock();
    int fits = bytes <= free_bytes();
    if (fits) used += bytes;
    if (used > peak) peak = used;
    unlock();
    if (!fits) standin_counted(STANDIN_OOMS);
    return fits;
}

void standin_give(size_t bytes) {
    standin_counted(STANDIN_FREES);
    lock();
    used -= bytes;
    unlock();
}

/* ------------------------------------------------------------------------------------------------------- device */

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return result(cudaSuccess);
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return result(cudaSuccess);
}

cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* torch divides by these figures and CUB steps by them: with a zero among them an operation crashes or does not end. */
static int attribute_value(enum cudaDeviceAttr attribute) {
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: return 8;
        case cudaDevAttrMultiProcessorCount: return 4;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrMaxBlockDimX: return 1024;
        case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrMaxGridDimX: return INT32_MAX;
        case cudaDevAttrMaxGridDimY: return 65535;
        case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 99 << 10;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 100 << 10;
        case cudaDevAttrMaxRegistersPerBlock: return 65536;
        case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
        case cudaDevAttrMaxBlocksPerMultiprocessor: return 16;
        case cudaDevAttrL2CacheSize: return 4 << 20;
        case cudaDevAttrTextureAlignment: return 512;
        case cudaDevAttrMemoryPoolsSupported: return 1;
        default: return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    (void)device;
    *value = attribute_value(attribute);
    return result(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, STANDIN_NAME);
    memcpy(properties->uuid.bytes, standin_uuid, sizeof standin_uuid);
    properties->totalGlobalMem = capacity;
    properties->major = attribute_value(cudaDevAttrComputeCapabilityMajor);
    properties->multiProcessorCount = attribute_value(cudaDevAttrMultiProcessorCount);
    properties->warpSize = attribute_value(cudaDevAttrWarpSize);
    properties->maxThreadsPerBlock = attribute_value(cudaDevAttrMaxThreadsPerBlock);
    properties->maxThreadsPerMultiProcessor = attribute_value(cudaDevAttrMaxThreadsPerMultiProcessor);
    properties->maxThreadsDim[0] = attribute_value(cudaDevAttrMaxBlockDimX);
    properties->maxThreadsDim[1] = attribute_value(cudaDevAttrMaxBlockDimY);
    properties->maxThreadsDim[2] = attribute_value(cudaDevAttrMaxBlockDimZ);
    properties->maxGridSize[0] = attribute_value(cudaDevAttrMaxGridDimX);
    properties->maxGridSize[1] = attribute_value(cudaDevAttrMaxGridDimY);
    properties->maxGridSize[2] = attribute_value(cudaDevAttrMaxGridDimZ);
    properties->sharedMemPerBlock = attribute_value(cudaDevAttrMaxSharedMemoryPerBlock);
    properties->sharedMemPerBlockOptin = attribute_value(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    properties->sharedMemPerMultiprocessor = attribute_value(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    properties->regsPerBlock = attribute_value(cudaDevAttrMaxRegistersPerBlock);
    properties->regsPerMultiprocessor = attribute_value(cudaDevAttrMaxRegistersPerMultiprocessor);
    properties->maxBlocksPerMultiProcessor = attribute_value(cudaDevAttrMaxBlocksPerMultiprocessor);
    properties->l2CacheSize = attribute_value(cudaDevAttrL2CacheSize);
    properties->textureAlignment = attribute_value(cudaDevAttrTextureAlignment);
    return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return result(cudaSuccess);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    (void)device, (void)peer;
    *can = 0;
    return result(cudaSuccess);
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    (void)device;
    snprintf(id, length, "%s", STANDIN_PCI_BUS_ID);
    return result(cudaSuccess);
}

/* ------------------------------------------------------------------------------------------------------- memory */

/* What was handed out, newest first. torch asks for large segments, so there are few. */
struct allocation {
    char *start;
    size_t bytes;
    enum cudaMemoryType type;
    struct allocation *next;
};
static struct allocation *allocations;

/* Fresh pages each time, and gone when freed: who touches freed device memory crashes, as on a card. */
static cudaError_t allocate(void **pointer, size_t bytes, enum cudaMemoryType type) {
    *pointer = NULL;
    if (!bytes) return cudaSuccess;
    struct allocation *made = malloc(sizeof *made);
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!made || start == MAP_FAILED) abort(); /* the machine is full, not the device */
    lock();
    *made = (struct allocation){start, bytes, type, allocations};
    allocations = made;
    unlock();
    *pointer = start;
    return cudaSuccess;
}

static struct allocation *forget(const void *pointer) {
    lock();
    struct allocation **link = &allocations;
    while (*link && (*link)->start != pointer) link = &(*link)->next;
    struct allocation *found = *link;
    if (found) *link = found->next;
    unlock();
    return found;
}

static cudaError_t release(void *pointer) {
    if (!pointer) return cudaSuccess;
    struct allocation *gone = forget(pointer);
    if (!gone) return result(cudaErrorInvalidValue);
    munmap(gone->start, gone->bytes);
    if (gone->type == cudaMemoryTypeDevice) standin_give(gone->bytes);
    free(gone);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    *pointer = NULL;
    if (forked) return result(cudaErrorInitializationError);
    if (!standin_take(bytes)) return result(cudaErrorMemoryAllocation);
    return allocate(pointer, bytes, cudaMemoryTypeDevice);
}

cudaError_t cudaFree(void *pointer) { return forked ? result(cudaErrorInitializationError) : release(pointer); }

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total) {
    *free_out = standin_free_bytes();
    *total = capacity;
    return result(cudaSuccess);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    return result(allocate(pointer, bytes, cudaMemoryTypeHost));
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaFreeHost(void *pointer) { return release(pointer); }

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)pointer, (void)bytes, (void)flags;
    return result(cudaSuccess);
}

cudaError_t cudaHostUnregister(void *pointer) {
    (void)pointer;
    return result(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    const char *address = pointer;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    lock();
    for (struct allocation *each = allocations; each; each = each->next)
        if (address >= each->start && address < each->start + each->bytes) attributes->type = each->type;
    unlock();
    if (attributes->type == cudaMemoryTypeDevice) attributes->devicePointer = (void *)pointer;
    return result(cudaSuccess);
}

/* The driver's own pool, which keeps nothing back here: PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync. */

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    (void)stream;
    return cudaMalloc(pointer, bytes);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    (void)stream;
    return cudaFree(pointer);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    (void)device;
    *pool = (cudaMemPool_t)&ledger;
    return result(cudaSuccess);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    (void)pool;
    int high = attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh;
    *(uint64_t *)value = high ? peak : used;
    return result(cudaSuccess);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    (void)pool, (void)value;
    if (attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh) standin_reset_peak();
    return result(cudaSuccess);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    (void)pool, (void)bytes;
    return result(cudaSuccess);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t count) {
    (void)pool, (void)list, (void)count;
    return result(cudaSuccess);
}

cudaError_t cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void *value) {
    (void)device, (void)attribute;
    *(uint64_t *)value = 0;
    return result(cudaSuccess);
}

cudaError_t cudaDeviceSetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void *value) {
    (void)device, (void)attribute, (void)value;
    return result(cudaSuccess);
}
