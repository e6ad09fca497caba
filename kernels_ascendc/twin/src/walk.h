// Shared by the vector instructions: operand checks, and the sliced walk one repeat at a time.
#pragma once

#include "twin/vector.h"

namespace twin {

void need_vector_operand(const Pipe& pipe, const View& v, const char* what);
void need_no_partial_overlap(const Pipe& pipe, const View& d, uint64_t d_bytes, const View& a, uint64_t a_bytes,
                             const char* what);
enum class Form { COUNT, SLICED, REGISTERS };
void need_type(Op op, Type type, Form form, Where where);
bool told_before_here(Where where);
uint64_t lane_bytes(Type type, int64_t lanes);
// The bytes of a block, holding `lanes` lanes from `first_lane` on, whose lanes the mask names.
uint32_t active_bytes(const Walk& walk, int first_lane, int lanes, int size);
const uint8_t* load_some(Pipe& pipe, Memory& memory, uint64_t offset, uint32_t bytes_of_block, const char* what);
void gather_repeat(Pipe& pipe, const View& v, Type type, const Walk& walk, int operand, int repeat, uint8_t* into,
                   const char* what);
void scatter_repeat(Pipe& pipe, const View& v, Type type, const Walk& walk, int repeat, const uint8_t* from);

}  // namespace twin
