//! Recorded memory: readings and marks of the last hour to the last month, in memory and in bounded files,
//! for the page and for programs.
//!
//! ```text
//!   fleet ─ views, events ─> recorder ─> live, marks ─┬─ every ten seconds ─> disk, marks_file
//!                            (a task)   (no blocking)  └─ query ─> answer <─ disk, for older buckets
//! ```
//!
//! The recorder reads published views, so the fleet never waits for it. A separate thread writes the files.
//! If a write fails, the log says so, and the data stays in memory as long as there is room.
//! `warden_policies::rollup` combines readings into buckets.

pub mod answer;
pub mod ask;
mod disk;
mod key;
mod live;
pub mod marks;
mod marks_file;
mod record;
mod recorder;
mod ring;
mod store;

pub use key::SeriesKey;
pub use recorder::record_fleet;
pub use store::{SeriesSpan, SeriesStore, SeriesStoreError};
