// A stand-in for libcuda.so.1: the few calls of cuda_driver.py over host memory, scripted by a test.
// Signatures and structs are cuda.h's. A piece is one mapping: what lies at [base, base + size).
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_PERMITTED = 800 };
enum { FD = 1, DEVICE_ORDINAL = 9, PIECES = 64 };

typedef struct {
    int type, requestedHandleTypes, locationType, locationId;
    void* win32;
    unsigned char flags[8];
} Properties;

typedef struct {
    uint64_t base, size;              // what is mapped here
    uint64_t range_base, range_size;  // what cuMemGetAddressRange returns
    uint64_t allocation;              // 0: memory of cudaMalloc
    int types, ordinal, fd;
} Piece;

static Piece pieces[PIECES];
static int piece_count, open_handles;
static char failing[64];
static CUresult failure;

// ---- the script -----------------------------------------------------------------------------

void standin_reset(void) {
    piece_count = open_handles = 0;
    failing[0] = 0;
}

void standin_map(uint64_t base, uint64_t size, uint64_t range_base, uint64_t range_size,
                 uint64_t allocation, int types, int ordinal, int fd) {
    pieces[piece_count++] =
        (Piece){base, size, range_base, range_size, allocation, types, ordinal, fd};
}

void standin_fail(const char* call, CUresult result) {
    strncpy(failing, call, sizeof failing - 1);
    failure = result;
}

int standin_open_handles(void) { return open_handles; }  // of allocations, not released yet

// ---- the driver -----------------------------------------------------------------------------

#define MAY_FAIL \
    if (strcmp(failing, __func__) == 0) return failure

static Piece* at(uint64_t address) {
    for (int i = 0; i < piece_count; i++)
        if (address >= pieces[i].base && address < pieces[i].base + pieces[i].size) return &pieces[i];
    return NULL;
}

static Piece* of(uint64_t allocation) {
    for (int i = 0; i < piece_count; i++)
        if (pieces[i].allocation == allocation) return &pieces[i];
    return NULL;
}

CUresult cuGetErrorName(CUresult result, const char** name) {
    *name = result == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : NULL;
    return *name ? SUCCESS : INVALID_VALUE;
}

CUresult cuMemGetAddressRange_v2(uint64_t* base, size_t* size, uint64_t address) {
    MAY_FAIL;
    Piece* piece = at(address);
    if (!piece) return INVALID_VALUE;
    *base = piece->range_base;
    *size = piece->range_size;
    return SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, int attribute, uint64_t address) {
    MAY_FAIL;
    Piece* piece = at(address);
    if (!piece || attribute != DEVICE_ORDINAL) return INVALID_VALUE;
    *(int*)data = piece->ordinal;
    return SUCCESS;
}

CUresult cuDeviceGet(int* device, int ordinal) {
    MAY_FAIL;
    *device = 100 + ordinal;
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    MAY_FAIL;
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(0x10 * (device - 100) + i);
    return SUCCESS;
}

CUresult cuIpcGetMemHandle(unsigned char* handle, uint64_t base) {
    MAY_FAIL;
    Piece* piece = at(base);
    if (!piece || piece->allocation || piece->range_base != base) return INVALID_VALUE;
    memset(handle, 0, 64);
    memcpy(handle + 8, &base, sizeof base);
    return SUCCESS;
}

CUresult cuMemRetainAllocationHandle(uint64_t* allocation, void* address) {
    MAY_FAIL;
    Piece* piece = at((uint64_t)(uintptr_t)address);
    if (!piece || !piece->allocation) return INVALID_VALUE;
    *allocation = piece->allocation;
    open_handles++;
    return SUCCESS;
}

CUresult cuMemRelease(uint64_t allocation) {
    MAY_FAIL;
    if (!of(allocation)) return INVALID_VALUE;
    open_handles--;
    return SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(Properties* properties, uint64_t allocation) {
    MAY_FAIL;
    Piece* piece = of(allocation);
    if (!piece) return INVALID_VALUE;
    memset(properties, 0xff, sizeof *properties);
    properties->requestedHandleTypes = piece->types;
    return SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* handle, uint64_t allocation, int type, uint64_t flags) {
    MAY_FAIL;
    Piece* piece = of(allocation);
    if (!piece || flags || type != FD || !(piece->types & type)) return INVALID_VALUE;
    *(int*)handle = dup(piece->fd);
    return SUCCESS;
}
