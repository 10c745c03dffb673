//! Errors of readings.

/// Error of a reading.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum SensorError {
    /// The process is gone or a zombie: it has no memory to read.
    #[error("cannot read the memory of process {pid}: it has ended")]
    Ended { pid: u32 },
    /// `/proc` cannot be read or lacks the needed entry.
    #[error("cannot read {what}: {source}; is /proc mounted, and with hidepid off for this user?")]
    Proc { what: String, source: procfs::ProcError },
    /// The kernel does not report this field.
    #[error("{what} has no field {field}: this kernel is too old (Linux 4.5 has it)")]
    NoField { what: String, field: &'static str },
}
