//! Functions and structs in C++ that no parser likes.
