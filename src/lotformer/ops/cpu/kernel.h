// Everything of the kernel, compiled once per instruction set by the files isa_*.cpp.
#pragma once
#include "backward.h"
#include "forward.h"
#include "found.h"
#include "joining.h"
#include "masses.h"
#include "near.h"
#include "pooling.h"
