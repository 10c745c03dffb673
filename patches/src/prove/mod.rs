//! Verification of a set in an unreviewed tree: the program to run there, and the record of the results,
//! valid for that code only. Pure: callers compile, run, and store the record.

mod harness;
mod proof;

pub use harness::{ConformanceProgram, assemble_program};
pub use proof::{PROOFS_SCHEMA, ProofObstacle, ProofRecords, ProofStep, SetProof, StepResult};
