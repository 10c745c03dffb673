//! Building blocks for all pages of llama-warden, so that they look alike: the page of a running instance,
//! and the report of an experiment, which is a self-contained file.
//!
//! ```text
//!  values ──> plot, bar, badge ──> Html ──> a fragment of a page
//!             words                          style::CSS next to it, or inside of a file
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`html`] | escaped text, and elements that are always closed |
//! | [`style`] | the one stylesheet: light, dark, print, phones; [`style::document`] puts it around a file |
//! | [`mod@badge`] | a state as colour, shape and word |
//! | [`bar`] | the use of a budget |
//! | [`plot`] | readings over requests or time with the fitted law, budgets, declared caches, events and forecasts |
//! | [`spark`] | a line without axes, for a row of a table |
//! | [`mod@time`] | moments, for people and for a script that knows their time zone |
//! | [`words`] | meaning of each verdict, in a sentence |
//!
//! The crate decides nothing, reads no clock and no file, and opens no socket. Its output needs no script,
//! font or network, and has no `style` attribute and no event handler, so it may be served under the
//! strictest content policy.
//!
//! There is no template engine: the output consists of lists, tables and drawings of numbers, where
//! unescaped text is the one dangerous mistake. [`html::Html`] escapes everything it is given, so
//! forgetting cannot cause that mistake.

pub mod badge;
pub mod bar;
pub mod html;
pub mod plot;
pub mod spark;
pub mod style;
pub mod time;
pub mod words;

mod number;

pub use badge::{BadgeTone, badge};
pub use html::{Html, escape};
