//! Building blocks for all pages of llama-warden, so that they look alike: the page of a running instance,
//! and the report of an experiment, which is a self-contained file.
//!
//! ```text
//!  values ──> plot, bar, badge ──> maud::Markup ──> a fragment of a page
//!             words                                 style::CSS next to it, or inside of a file
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`html`] | lists and heads of tables, and the last step of every page |
//! | [`style`] | the one stylesheet: light, dark, print, phones; [`style::document`] puts it around a file |
//! | [`mod@badge`] | a state as colour, shape and word |
//! | [`bar`] | the use of a budget |
//! | [`plot`] | readings over requests or time with the fitted law, budgets, declared caches, events and forecasts |
//! | [`mod@time`] | moments, for people and for a script that knows their time zone |
//! | [`words`] | meaning of each verdict, in a sentence |
//!
//! The crate decides nothing, reads no clock and no file, and opens no socket. The strictest content policy
//! allows its output, which has no script, font, `style` attribute or event handler, and needs no network.
//!
//! Markup is written with `maud`, which escapes every value, so forgetting to escape is not possible.

pub mod badge;
pub mod bar;
pub mod html;
pub mod plot;
pub mod style;
pub mod time;
pub mod words;

mod number;

pub use badge::{BadgeTone, badge};
pub use html::{finish_page, table_head, term_list, text_list};
