// The instruction-set builds of the CPU driver; which of them exist is up to setup.py.
#pragma once

#include "rows.h"

#define ICL_PATCH_DECLARE(isa)                                             \
  namespace icl_patch::isa {                                               \
  void invert_rows(const Inversion& call, int64_t begin, int64_t end);     \
  }
ICL_PATCH_DECLARE(portable)
ICL_PATCH_DECLARE(avx2)
ICL_PATCH_DECLARE(avx512)
#undef ICL_PATCH_DECLARE
