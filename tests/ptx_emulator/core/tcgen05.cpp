#include "core.h"
namespace ptxemu {
void register_tcgen05() {}
}  // namespace ptxemu
