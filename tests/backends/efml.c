/* Stands in for the vendor's management library: three cards, the last with no word on its memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct memory { unsigned long long total, free, used; };
struct rates { unsigned gcu, memory; };
struct pci { unsigned domain, bus, device, function, id, subsystem; char bus_id[32]; };
static int ready;
static int number(void *card) { return (int)((char *)card - (char *)0x7fff00000000) - 1; }
#ifdef OLD
int efmlInit(void) { ready = 1; return 0; }
#else
int efmlInit(void) { return 9; }  /* as where the new one has to be called */
int efmlInit_v2(void) { ready = getenv("NO_DRIVER") == NULL; return ready ? 0 : 9; }
int efmlDeviceGetPowerUsage(void *card, unsigned *milliwatts) { *milliwatts = 96500 + number(card); return 0; }
#endif
int efmlDeviceGetCount_v2(unsigned *count) { *count = 3; return ready ? 0 : 1; }
/* Handles need all 64 bits. */
int efmlDeviceGetHandleByIndex_v2(unsigned index, void **card) { *card = (char *)0x7fff00000000 + index + 1; return 0; }
int efmlDeviceGetUUID(void *card, char *text, unsigned length) {
  return length == 96 ? (sprintf(text, "GCU-%d0ab", number(card)), 0) : 7;
}
int efmlDeviceGetName(void *card, char *text, unsigned length) { strncpy(text, "Enflame S60", length); return 0; }
int efmlDeviceGetMemoryInfo(void *card, struct memory *memory) {
  *memory = (struct memory){48ull << 30, 47ull << 30, 1ull << 30};
  return number(card) == 2 ? 3 : 0;
}
int efmlDeviceGetUtilizationRates(void *card, struct rates *rates) { rates->gcu = 10 * number(card); return 0; }
int efmlDeviceGetPciInfo_v3(void *card, struct pci *pci) { strcpy(pci->bus_id, "0000:3d:00.0"); return 0; }
int efmlDeviceGetTemperature(void *card, int sensor, int *degrees) { *degrees = 40 + sensor; return 0; }
