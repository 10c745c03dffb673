//! Amounts of memory in words, always in MiB, so that figures compare.

pub(super) const MIB: f64 = 1_048_576.0;

/// `+4.42 MiB`.
pub(super) fn grows(bytes: f64) -> String {
    format!("{:+.2} MiB", bytes / MIB)
}

/// `4.420 (4.100 to 4.700)`, as MiB; an end that is not known is none.
pub(super) fn interval(slope: &warden_policies::growth::Interval) -> String {
    let end = |bytes: f64| {
        if bytes.is_finite() && bytes.abs() < 1e15 { format!("{:.3}", bytes / MIB) } else { "?".to_owned() }
    };
    format!("{:+.3} MiB a request ({} to {})", slope.value / MIB, end(slope.low), end(slope.high))
}
