//! Defaults of what is kept of readings, to be shown later.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};
use crate::units::ByteSize;

section!(
    /// What is kept of readings: buckets of four widths, each for some time.
    #[derive(Copy)]
    Series of "series" {
        /// The finest buckets ...
        first: Duration = "duration" where Takes::AtLeast("1s"),
        /// The next ones.
        second: Duration = "duration" where Takes::AtLeast("1s"),
        /// The next ones.
        third: Duration = "duration" where Takes::AtLeast("1s"),
        /// The widest ones.
        fourth: Duration = "duration" where Takes::AtLeast("1s"),
        /// A reading says for so long what memory is.
        fresh: Duration = "duration",
        /// Pause between two writes to disk.
        flush: Duration = "duration" where Takes::AtLeast("1ms"),
        /// All files of series together; those that were not written for longest go first.
        bytes: ByteSize,
        /// Memories that are read at a time, at most.
        live: usize,
        /// Buckets that wait for the disk, at most.
        waiting: usize,
        /// Marks of one model, at most.
        marks_of_model: usize,
        /// Marks of all models, at most.
        marks: usize,
        /// Bytes of a mark's sentence, at most.
        mark_bytes: usize,
        /// Points of an answer, if nobody says otherwise.
        points: usize,
        /// Points of an answer, at most.
        points_most: usize,
        /// Pause between two looks at the fleet's picture.
        look: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Pause between two looks whether the files may be written that another instance writes.
        retry: Duration = "duration" where Takes::AtLeast("1ms"),
        /// An answer waits no longer than this for the disk.
        patience: Duration = "duration" where Takes::AtLeast("1ms"),
    }
);
