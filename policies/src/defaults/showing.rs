//! Defaults of the kept history of readings.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{AcceptedValues, DefaultsKey, DefaultsSection};
use crate::units::ByteSize;

section!(
    /// History of readings: buckets of four widths, each kept for some time.
    #[derive(Copy)]
    Series of "series" {
        /// Width of the finest buckets.
        first: Duration = "duration" where AcceptedValues::AtLeast("1s"),
        /// Width of the second buckets.
        second: Duration = "duration" where AcceptedValues::AtLeast("1s"),
        /// Width of the third buckets.
        third: Duration = "duration" where AcceptedValues::AtLeast("1s"),
        /// Width of the widest buckets.
        fourth: Duration = "duration" where AcceptedValues::AtLeast("1s"),
        /// Time for which a reading counts as the present value.
        fresh: Duration = "duration",
        /// Pause between writes to disk.
        flush: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Total size of all series files; those written longest ago are deleted first.
        bytes: ByteSize,
        /// Most memories read at a time.
        live: usize,
        /// Most buckets waiting for the disk.
        waiting: usize,
        /// Most marks of one model.
        marks_of_model: usize,
        /// Most marks of all models.
        marks: usize,
        /// Most bytes of a mark's text.
        mark_bytes: usize,
        /// Default number of points in an answer.
        points: usize,
        /// Most points in an answer.
        points_most: usize,
        /// Pause between checks of the fleet's state.
        look: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Pause between attempts to take over the files that another instance writes.
        retry: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Longest wait of an answer for the disk.
        patience: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
    }
);
