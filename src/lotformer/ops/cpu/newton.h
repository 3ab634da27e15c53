#pragma once
#include "head.h"
namespace {
struct HessianSink { void add(Worker&, const float*, const float*, const float*, int) const {} };
static void solve_keys(const Head&, const Tokens&, const Rows&, float*, float*) {}
static void solve_queries(const Head&, const Tokens&, float*, float*, float*) {}
struct Reverse; struct Mixed;
static float* reverse_newton(Reverse&,int,const float*,const Rows&,const Rows&,Mixed&,double*){return nullptr;}
}
