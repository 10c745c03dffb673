//! The page for a browser: running models, their memory, the next actions and their reasons. The page is
//! rendered here and readable without a script; a script keeps it up to date.
//!
//! ```text
//!   request ─ guard: allowed? ─ view: which? ─┬─ hub: the shared snapshot ─ overview, … ─ frame ─ gzip
//!                                             ├─ live: stream of picture numbers
//!                                             └─ act: check the token, start one action, add a notice
//! ```
//!
//! | module | job |
//! |---|---|
//! | `state` | the state of the page, served by the admin listeners |
//! | `serve` | answers requests |
//! | `guard` | checks hosts and origins; pure |
//! | `door` | the public listener: keys, sessions |
//! | `token` | token in forms |
//! | `view` | views and paths; pure |
//! | `hub` | the shared picture, notices |
//! | `pace` | rates of requests |
//! | `frame` | frame around every view; pure |
//! | `overview`, `memory`, `requests`, `events` | views; pure |
//! | `configuration`, `builds` | views; pure |
//! | `build_text` | builds in the words of a table; pure |
//! | `drawn` | plot of one kind of recorded memory; pure |
//! | `part` | parts shared by several views; pure |
//! | `markup` | building blocks of views: lists, badges, bars, plots, the stylesheet; pure |
//! | `act` | actions on models |
//! | `live` | the event stream |
//! | `files` | style and script, compiled in |
//! | `answer` | answers and their headers |

mod act;
mod answer;
pub mod build_text;
mod builds;
mod configuration;
mod door;
mod drawn;
mod events;
mod files;
mod frame;
mod guard;
mod hub;
mod live;
mod markup;
mod memory;
mod overview;
mod pace;
mod part;
#[cfg(test)]
#[path = "../../admin/tests/fixtures/request_fixture.rs"]
mod request_fixture;
mod requests;
mod serve;
mod state;
mod token;
mod view;

pub use door::SignInGuard;
pub use state::PageState;
