/* libnvidia-ml.so.1 for tests: the functions that roofscope calls, with the signatures and the codes of nvml.h.

   What it answers lies in the file that NVML_STATE names, read anew at every call, one `key value` a line:
     init                 what nvmlInit returns
     driver, cuda         of the system
     N.uuid               of device N, a whole card or a slice of one
     N.<key>              one of its figures; one that is missing is not supported
     N.busy_from          since when (CLOCK_MONOTONIC, seconds) it has been busy: what it tells is of the last second
     N.<function>         the code that this function returns for it
     N.lost               whether it fell off the bus */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };

typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gi, ci; } Process;

/* The text behind a key; 0 where it is not in the file. */
static int text(const char *key, char *found, size_t size) {
  FILE *file = fopen(getenv("NVML_STATE"), "r");
  char line[512];
  size_t length = strlen(key);
  int seen = 0;
  while (file && !seen && fgets(line, sizeof line, file))
    if (!strncmp(line, key, length) && line[length] == ' ') {
      line[strcspn(line, "\n")] = 0;
      snprintf(found, size, "%s", line + length + 1);
      seen = 1;
    }
  if (file) fclose(file);
  return seen;
}

static double number(const char *key, double otherwise) {
  char found[256];
  return text(key, found, sizeof found) ? atof(found) : otherwise;
}

static double of(void *device, const char *key, double otherwise) {
  char whole[128];
  snprintf(whole, sizeof whole, "%ld.%s", (long)device - 1, key);
  return number(whole, otherwise);
}

static int ask(void *device, const char *function, const char *key, double *value) {
  if (of(device, "lost", 0)) return GPU_IS_LOST;
  int code = (int)of(device, function, SUCCESS);
  if (code) return code;
  *value = of(device, key, NAN);
  return isnan(*value) ? NOT_SUPPORTED : SUCCESS;
}

#define ASK(key) \
  double value; \
  int code = ask(device, __func__, key, &value); \
  if (code) return code;

int nvmlInitWithFlags(unsigned int flags) { (void)flags; return (int)number("init", SUCCESS); }

const char *nvmlErrorString(int code) {
  switch (code) {
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}

int nvmlSystemGetDriverVersion(char *version, unsigned int size) {
  return text("driver", version, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = (int)number("cuda", 0);
  return *version ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  char key[32], found[256];
  for (long index = 0; index < 16; index++) {
    snprintf(key, sizeof key, "%ld.uuid", index);
    if (text(key, found, sizeof found) && !strcmp(found, uuid)) {
      *device = (void *)(index + 1);
      return SUCCESS;
    }
  }
  return NOT_FOUND;
}

int nvmlDeviceGetClockInfo(void *device, int kind, unsigned int *mhz) {
  if (kind != 1) return INVALID_ARGUMENT; /* NVML_CLOCK_SM */
  ASK("clock_mhz") *mhz = (unsigned int)value;
  return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
  if (sensor != 0) return INVALID_ARGUMENT; /* NVML_TEMPERATURE_GPU */
  ASK("temperature_c") *celsius = (unsigned int)value;
  return SUCCESS;
}

#define FIGURE(function, key, type) \
  int function(void *device, type *figure) { ASK(key) *figure = (type)value; return SUCCESS; }
FIGURE(nvmlDeviceGetPowerUsage, "power_mw", unsigned int)
FIGURE(nvmlDeviceGetEnforcedPowerLimit, "limit_mw", unsigned int)
FIGURE(nvmlDeviceGetPowerManagementDefaultLimit, "default_limit_mw", unsigned int)
FIGURE(nvmlDeviceGetPersistenceMode, "persistence", int)
FIGURE(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_generation", unsigned int)
FIGURE(nvmlDeviceGetCurrPcieLinkWidth, "pcie_lanes", unsigned int)
FIGURE(nvmlDeviceGetCurrentClocksThrottleReasons, "reasons", unsigned long long)
FIGURE(nvmlDeviceGetCurrentClocksEventReasons, "reasons", unsigned long long)

#define MODE(function, key, type) \
  int function(void *device, type *now, type *pending) { ASK(key) *now = *pending = (type)value; return SUCCESS; }
MODE(nvmlDeviceGetEccMode, "ecc", int)
MODE(nvmlDeviceGetMigMode, "mig", unsigned int)

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* `sm_percent` of the part of the last second in which the device was busy. */
int nvmlDeviceGetUtilizationRates(void *device, Utilization *active) {
  ASK("sm_percent")
  double busy_s = now_s() - of(device, "busy_from", 0);
  active->gpu = (unsigned int)(value * fmin(1, fmax(0, busy_s)));
  active->memory = (unsigned int)of(device, "memory_percent", 0);
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
  ASK("memory_used")
  memory->used = (unsigned long long)value;
  memory->total = (unsigned long long)of(device, "memory_total", 0);
  memory->free = memory->total - memory->used;
  return SUCCESS;
}

/* Millijoules at `mean_w`, counted on every tenth of a second alone. */
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
  ASK("mean_w")
  unsigned long long ticks = (unsigned long long)(now_s() * 10);
  *millijoules = (unsigned long long)(value * 100) * ticks;
  return SUCCESS;
}

/* Processes `pid.0`, `pid.1`, ... of a device; their number alone where there is no room for them. */
static int processes(void *device, const char *function, unsigned int *count, Process *found) {
  double value;
  int code = ask(device, function, "processes", &value);
  if (code) return code;
  unsigned int room = *count;
  *count = (unsigned int)value;
  if (*count == 0) return SUCCESS;
  if (room < *count || !found) return INSUFFICIENT_SIZE;
  for (unsigned int index = 0; index < *count; index++) {
    char key[32];
    snprintf(key, sizeof key, "pid.%u", index);
    found[index] = (Process){(unsigned int)of(device, key, 0), 0, 0, 0};
  }
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(void *device, unsigned int *count, Process *found) {
  return processes(device, __func__, count, found);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *count, Process *found) {
  return processes(device, __func__, count, found);
}
