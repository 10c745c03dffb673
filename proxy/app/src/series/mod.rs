//! Recorded memory: readings and marks of the last hour to the last month, in memory and in bounded files,
//! for the page and for programs.
//!
//! ```text
//!   fleet ─ views, events ─> recorder ─> live, marks ─┬─ every ten seconds ─> disk, marks_file
//!                            (a task)   (no blocking)  └─ query ─> answer <─ disk, for older buckets
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`recorder`] | the task: takes readings from the fleet, and starts writes |
//! | [`store`] | owns the data and its locks |
//! | [`live`] | buckets that are not in files yet |
//! | [`marks`] | actions and events |
//! | [`key`], [`mod@record`], [`ring`], [`disk`], [`marks_file`] | files: names, records, file format, folder, marks |
//! | [`ask`] | queries; pure |
//! | [`answer`] | answers |
//!
//! The fleet never waits for the recorder, which reads the published views. Files are written on a separate
//! thread. If they cannot be written, the log says so, and only older data is missing.
//! `warden_policies::rollup` combines readings into buckets.

pub(crate) mod answer;
pub(crate) mod ask;
mod disk;
mod key;
mod live;
pub(crate) mod marks;
mod marks_file;
mod record;
mod recorder;
mod ring;
mod store;

pub(crate) use recorder::record_fleet;
pub(crate) use store::{SeriesSpan, SeriesStore};
