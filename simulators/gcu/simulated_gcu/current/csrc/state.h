// What the monitors see: one file per machine, with a line of numbers for each process that holds memory on its cards.
#pragma once
#include <stdint.h>

#define SIMGCU_CARDS 64
#define SIMGCU_PROCESSES 64

typedef struct {
  int64_t pid;  // 0: free; that of a process that has ended: free, too
  int64_t bytes[SIMGCU_CARDS];
} SimgcuProcess;

typedef struct {
  SimgcuProcess processes[SIMGCU_PROCESSES];
} SimgcuState;
