//! What memory did: readings and marks of an hour to a month, in memory and in bounded files, for the page and for programs.
//!
//! ```text
//!   fleet ─ views, events ─> recorder ─> live, marks ─┬─ every ten seconds ─> disk, marks_file
//!                            (a task)    (no waiting)  └─ asked ─> answer <─ disk, where that has older ones
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`recorder`] | the task: what is a reading of what, and when it is written |
//! | [`store`] | the one owner of all of it |
//! | [`live`] | what is not in files |
//! | [`marks`] | what was done |
//! | [`key`], [`mod@record`], [`ring`], [`disk`], [`marks_file`] | files, from their names to their folder |
//! | [`ask`] | what is asked for; pure |
//! | [`answer`] | what it is answered |
//!
//! Nothing of the fleet waits for it: it reads what the fleet publishes, and files are written on a thread of their own. Where they cannot be
//! written, a sentence in the log says so, and everything but the past goes on. How readings become buckets: `warden_policies::rollup`.

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

pub(crate) use recorder::record;
pub(crate) use store::Store;
