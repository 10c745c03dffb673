//! What shows a set to be good in a tree that nobody has looked at: the program that is played there, and the record of what
//! was shown, which counts for that code and for no other. Pure: what is compiled and run, and where a record lies, is the
//! matter of others.

mod harness;
mod proof;

pub use harness::{Harness, harness};
pub(crate) use proof::placed;
pub use proof::{Done, How, Proof, Proofs, SCHEMA, WhyNot};
