//! Amounts of memory in words, always in MiB, so that figures compare.

pub(super) const MIB: f64 = 1_048_576.0;

/// `+4.42 MiB`.
pub(super) fn grows(bytes: f64) -> String {
    format!("{:+.2} MiB", bytes / MIB)
}
