// Publishes what this process holds on each card; only where SIM_GCU_STATE names a file.
#include "state.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "runtime.h"

namespace simgcu {
namespace {

SimgcuProcess* claim() {
  const char* path = getenv("SIM_GCU_STATE");
  if (!path || !*path) return nullptr;
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  SimgcuProcess* mine = nullptr;
  flock(file, LOCK_EX);
  if (ftruncate(file, sizeof(SimgcuState)) == 0) {
    void* memory = mmap(nullptr, sizeof(SimgcuState), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED)
      for (auto& process : static_cast<SimgcuState*>(memory)->processes)
        if (!mine && (process.pid == 0 || kill(static_cast<pid_t>(process.pid), 0) != 0)) {
          process = SimgcuProcess{};
          process.pid = getpid();
          mine = &process;
        }
  }
  flock(file, LOCK_UN);
  close(file);
  return mine;
}

}  // namespace

void publish(int card, int64_t bytes) {
  static SimgcuProcess* const mine = claim();
  if (mine && mine->pid == getpid()) mine->bytes[card] = bytes;
}

}  // namespace simgcu
