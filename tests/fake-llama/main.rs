//! Fake.
fn main() {}
