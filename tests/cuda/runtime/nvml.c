/* NVML of the stand-in, as libnvidia-ml.so.1: one device with the runtime's uuid and figures, this process, and the
   foreign process that a test has set. Its header is in no wheel, so the few structs are declared here, by the layout
   that the published header gives them. */

#include "standin.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7
};

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v2_t;

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

static int the_device;

static nvmlReturn_t text(char *to, unsigned length, const char *from) {
    return (unsigned)snprintf(to, length, "%s", from) < length ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

static nvmlReturn_t found(nvmlDevice_t *device, int there) {
    *device = &the_device;
    return there ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

/* ------------------------------------------------------------------------------------------------------- library */

nvmlReturn_t nvmlInit_v2(void) { return NVML_SUCCESS; }

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }

const char *nvmlErrorString(nvmlReturn_t error) {
    switch (error) {
        case NVML_SUCCESS: return "Success";
        case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
        case NVML_ERROR_NOT_FOUND: return "Not Found";
        case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
        default: return "Invalid Argument";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) { return text(version, length, "0.stand-in"); }

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    struct standin_foreign foreign = standin_foreign();
    return pid && pid == foreign.pid ? text(name, length, foreign.name) : NVML_ERROR_NOT_FOUND;
}

/* -------------------------------------------------------------------------------------------------------- device */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    (void)device;
    const unsigned char *u = standin_uuid;
    char written[48];
    snprintf(written, sizeof written, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0],
             u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    return text(uuid, length, written);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) { return found(device, index == 0); }

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    char own[48];
    nvmlDeviceGetUUID(NULL, own, sizeof own);
    return found(device, !strcmp(uuid, own));
}

/* The domain may be written with four digits or with eight. */
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device) {
    unsigned domain, bus, slot, function = 0;
    int read = sscanf(id, "%x:%x:%x.%x", &domain, &bus, &slot, &function);
    return found(device, read >= 3 && !domain && !bus && !slot && !function);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    (void)device;
    return text(name, length, STANDIN_NAME);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    (void)device;
    *index = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    (void)device;
    memset(info, 0, sizeof *info);
    strcpy(info->busIdLegacy, STANDIN_PCI_BUS_ID);
    strcpy(info->busId, "0000" STANDIN_PCI_BUS_ID);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    (void)device, (void)current, (void)pending;
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, void *info) {
    (void)device, (void)info;
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, void *type) {
    (void)device, (void)link, (void)type;
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *info) {
    (void)device, (void)link, (void)info;
    return NVML_ERROR_NOT_SUPPORTED;
}

/* -------------------------------------------------------------------------------------------------------- memory */

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    (void)device;
    memory->total = standin_capacity();
    memory->free = standin_free_bytes();
    memory->used = memory->total - memory->free;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlMemory_t figures;
    nvmlDeviceGetMemoryInfo(device, &figures);
    memory->total = figures.total;
    memory->free = figures.free;
    memory->used = figures.used;
    memory->reserved = 0;
    return NVML_SUCCESS;
}

/* ----------------------------------------------------------------------------------------------------- processes */

static unsigned processes(nvmlProcessInfo_v2_t list[2]) {
    struct standin_foreign foreign = standin_foreign();
    unsigned count = 0;
    memset(list, 0, 2 * sizeof *list);
    if (standin_used()) {
        list[count].pid = getpid();
        list[count++].usedGpuMemory = standin_used();
    }
    if (foreign.pid) {
        list[count].pid = foreign.pid;
        list[count++].usedGpuMemory = foreign.bytes;
    }
    return count;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *list) {
    (void)device;
    nvmlProcessInfo_v2_t running[2];
    unsigned room = list ? *count : 0;
    *count = processes(running);
    if (*count > room) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) list[i] = running[i];
    return NVML_SUCCESS;
}

/* The name without a version has the struct of the first one: torch itself uses it, for its out-of-memory message. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *list) {
    nvmlProcessInfo_v2_t running[2];
    unsigned room = list ? *count : 0;
    *count = processes(running);
    (void)device;
    if (*count > room) return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) {
        list[i].pid = running[i].pid;
        list[i].usedGpuMemory = running[i].usedGpuMemory;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                      nvmlProcessInfo_v2_t *list) {
    (void)device, (void)list;
    *count = 0;
    return NVML_SUCCESS;
}
