// libefml.so.1: the vendor's management library, as far as its public callers show it, over simulated cards.
//
// Counts the cards of the machine, whatever TOPS_VISIBLE_DEVICES hides, and needs neither torch nor the plug-in. Memory in
// use is what the processes that share SIM_GCU_STATE hold; a card that one of them uses is fully utilised.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "csrc/state.h"

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

typedef struct efmlDevice {
  unsigned index;
} *efmlDevice_t;

static struct efmlDevice cards[SIMGCU_CARDS];
static int initialized;

static unsigned total_count(void) {
  const char* text = getenv("SIM_GCU_COUNT");
  int count = text && *text ? atoi(text) : 8;
  return count < 0 ? 0 : count > SIMGCU_CARDS ? SIMGCU_CARDS : (unsigned)count;
}

static unsigned long long total_memory(void) {
  const char* text = getenv("SIM_GCU_MEMORY");
  if (!text || !*text) return 42ULL << 30;
  char* unit = NULL;
  double number = strtod(text, &unit);
  unsigned long long factor = strcmp(unit, "KiB") == 0   ? 1ULL << 10
                              : strcmp(unit, "MiB") == 0 ? 1ULL << 20
                              : strcmp(unit, "GiB") == 0 ? 1ULL << 30
                                                         : 1;
  return (unsigned long long)(number * factor);
}

static unsigned long long used_memory(unsigned card) {
  const char* path = getenv("SIM_GCU_STATE");
  int file = path && *path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return 0;
  unsigned long long used = 0;
  struct stat status;
  if (fstat(file, &status) == 0 && status.st_size >= (off_t)sizeof(SimgcuState)) {
    SimgcuState* state = mmap(NULL, sizeof(SimgcuState), PROT_READ, MAP_SHARED, file, 0);
    if (state != MAP_FAILED) {
      for (int i = 0; i < SIMGCU_PROCESSES; ++i)
        if (state->processes[i].pid && kill((pid_t)state->processes[i].pid, 0) == 0)
          used += (unsigned long long)state->processes[i].bytes[card];
      munmap(state, sizeof(SimgcuState));
    }
  }
  close(file);
  return used;
}

static int write_text(char* target, unsigned length, const char* text) {
  if (!target) return INVALID_ARGUMENT;
  if (strlen(text) >= length) return INSUFFICIENT_SIZE;
  strcpy(target, text);
  return SUCCESS;
}

#define CHECK_CARD(device, result)                                      \
  if (!initialized) return UNINITIALIZED;                               \
  if (!(device) || !(result) || (device)->index >= total_count()) return INVALID_ARGUMENT;

int efmlInit(void) {
  for (unsigned i = 0; i < SIMGCU_CARDS; ++i) cards[i].index = i;
  initialized = 1;
  return SUCCESS;
}
int efmlInitV2(void) { return efmlInit(); }
int efmlInit_v2(void) { return efmlInit(); }
int efmlShutdown(void) {
  initialized = 0;
  return SUCCESS;
}
const char* efmlErrorString(int code) {
  return code == SUCCESS             ? "Success"
         : code == UNINITIALIZED     ? "Uninitialized"
         : code == INVALID_ARGUMENT  ? "Invalid argument"
         : code == INSUFFICIENT_SIZE ? "Insufficient size"
                                     : "Not found";
}

int efmlDeviceGetCount_v2(unsigned* count) {
  if (!initialized) return UNINITIALIZED;
  if (!count) return INVALID_ARGUMENT;
  *count = total_count();
  return SUCCESS;
}
int efmlDeviceGetCount(unsigned* count) { return efmlDeviceGetCount_v2(count); }

int efmlDeviceGetHandleByIndex_v2(unsigned index, efmlDevice_t* device) {
  if (!initialized) return UNINITIALIZED;
  if (!device) return INVALID_ARGUMENT;
  if (index >= total_count()) return NOT_FOUND;
  *device = &cards[index];
  return SUCCESS;
}
int efmlDeviceGetHandleByIndex(unsigned index, efmlDevice_t* device) { return efmlDeviceGetHandleByIndex_v2(index, device); }

int efmlDeviceGetUUID(efmlDevice_t device, char* uuid, unsigned length) {
  CHECK_CARD(device, uuid)
  char text[40];
  snprintf(text, sizeof text, "GCU-simulated-%u", device->index);
  return write_text(uuid, length, text);
}

int efmlDeviceGetName(efmlDevice_t device, char* name, unsigned length) {
  CHECK_CARD(device, name)
  const char* profile = getenv("SIM_GCU_PROFILE");
  const char* text = !profile || !*profile            ? "Enflame GCU (simulated)"
                     : strcmp(profile, "l600") == 0 ? "Enflame L600 (simulated)"
                                                    : "Enflame S60 (simulated)";
  return write_text(name, length, text);
}

typedef struct {
  unsigned long long total, free, used;
} efmlMemory_v1_t;
int efmlDeviceGetMemoryInfo(efmlDevice_t device, efmlMemory_v1_t* memory) {
  CHECK_CARD(device, memory)
  memory->total = total_memory();
  memory->used = used_memory(device->index);
  memory->free = memory->total - memory->used;
  return SUCCESS;
}

typedef struct {
  unsigned gcu, memory;  // percent
} efmlUtilization_t;
int efmlDeviceGetUtilizationRates(efmlDevice_t device, efmlUtilization_t* rates) {
  CHECK_CARD(device, rates)
  unsigned long long used = used_memory(device->index);
  rates->gcu = used ? 100 : 0;
  rates->memory = (unsigned)(100 * used / total_memory());
  return SUCCESS;
}

// In mW: what the tables of real S60 show of a sleeping card and of a busy one.
int efmlDeviceGetPowerUsage(efmlDevice_t device, unsigned* power) {
  CHECK_CARD(device, power)
  *power = used_memory(device->index) ? 160000 : 105000;
  return SUCCESS;
}

typedef struct {
  char busIdLegacy[16];
  unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
  char busId[32];
} efmlPciInfo_t;
int efmlDeviceGetPciInfo(efmlDevice_t device, efmlPciInfo_t* info) {
  CHECK_CARD(device, info)
  memset(info, 0, sizeof *info);
  info->bus = device->index + 1;
  snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "00:%02x:00.0", info->bus);
  snprintf(info->busId, sizeof info->busId, "0000:%02x:00.0", info->bus);
  return SUCCESS;
}
