//! The frame around every view: head, navigation, the form that sends actions, help; and the pages of
//! visitors who are not signed in. Turns values into markup.

use std::fmt::Display;

use maud::{Markup, PreEscaped, html};
use warden_policies::growth::GrowthVerdict;
use warden_policies::phrases;

use crate::files;
use crate::hub::{ActionNotice, ActionOutcome};
use crate::markup::{document, finish_page, term_list};
use crate::part::moment_element;
use crate::view::PageView;

/// Icon of the page: bars in a square. Inline, so that browsers need not request it.
const PAGE_ICON: &str = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E\
                         %3Crect width='16' height='16' rx='3' fill='%230a5aa5'/%3E\
                         %3Cpath d='M3 12V8h2v4zm4 0V4h2v8zm4 0V6h2v6z' fill='%23fff'/%3E%3C/svg%3E";

pub(crate) struct PageFrame<'a> {
    pub(crate) view: PageView,
    /// Subject of the view, appended to its name in the title; may be empty.
    pub(crate) subject: &'a str,
    pub(crate) here: &'a str,
    /// Token for forms, behind a random mask.
    pub(crate) token: &'a str,
    /// Id of this run of the program.
    pub(crate) boot: &'a str,
    /// Name of the key of the visitor's session, if there is one.
    pub(crate) signed_in: Option<&'a str>,
    /// Filter form of the view, which is not refreshed, so that a user's typing is not disturbed.
    pub(crate) controls: Markup,
}

/// Returns a whole document of the page. `more`: further elements of the `<head>`.
fn html_document(title: impl Display, more: &Markup, body: &Markup) -> String {
    let head = html! {
        meta name="color-scheme" content="light dark";
        title { (title) }
        link rel="icon" href=(PAGE_ICON);
        style { (PreEscaped(&files::page_files().style.text)) }
        (more)
    };
    document(&head, body)
}

/// Returns a whole document around the refreshed part of a view, which [`refreshed_part`] has made.
pub(crate) fn page_document(frame: &PageFrame, part: &str) -> String {
    let view = frame.view;
    let files = files::page_files();
    let of = if frame.subject.is_empty() { String::new() } else { format!(" of {}", frame.subject) };
    let script = html! {
        script type="module" src=(files.script.path) {}
    };
    let body = html! {
        body data-boot=(frame.boot) data-view=(view.word()) data-files=(files.tag) {
            a class="skip" href="#main" { "Skip to the content" }
            header class="top" {
                (navigation(view))
                p id="live" class="quiet" role="status" {}
            }
            form id="act" method="post" action="/page/act" {
                input type="hidden" name="token" value=(frame.token);
                input type="hidden" name="back" value=(frame.here);
            }
            (frame.controls)
            (PreEscaped(part))
            footer class="quiet" {
                "Keys: "
                kbd { "j" } " " kbd { "k" } " rows, " kbd { "/" } " filter, "
                kbd { "1" } "–" kbd { "7" } " views, "
                a href="/page/help" id="help-link" { "all keys and words" }
                ". Times are in UTC where no script runs."
                @if let Some(key) = frame.signed_in {
                    (sign_out_form(key, frame.token))
                }
            }
        }
    };
    html_document(format_args!("{}{of} · llama-warden", view.title()), &script, &body)
}

/// Returns the sign-out form. No script handles it, because it leads to another page.
fn sign_out_form(key: &str, token: &str) -> Markup {
    html! {
        form method="post" action="/page/sign-out" id="sign-out" {
            input type="hidden" name="token" value=(token);
            span class="quiet" { "Signed in with the key " (key) ". " }
            button { "Sign out" }
        }
    }
}

/// Returns the sign-in page. `why`: the error of the last attempt.
pub(crate) fn sign_in_page(back: &str, why: Option<&str>) -> String {
    let content = html! {
        h1 { "llama-warden" }
        @if let Some(why) = why {
            p class="bad" role="alert" { (why) }
        }
        form method="post" action="/page/sign-in" class="filter" {
            input type="hidden" name="back" value=(back);
            label for="key" { "Key of an operator" }
            input id="key" name="key" type="password" autocomplete="current-password" required autofocus;
            button { "Sign in" }
        }
        p class="quiet" {
            "The browser keeps it for some hours, as a cookie that no script can read. A key with "
            "`operator = true` in the file of keys opens the page."
        }
    };
    bare_document("Sign in", &Markup::default(), &content)
}

/// Redirects from within the page, because a navigation from another site sends no session cookie.
pub(crate) fn redirect_page(to: &str) -> String {
    let refresh = html! {
        meta http-equiv="refresh" content={ "0;url=" (to) };
    };
    let content = html! {
        p { a href=(to) { "Continue to the page" } }
    };
    bare_document("llama-warden", &refresh, &content)
}

fn bare_document(title: &str, more: &Markup, content: &Markup) -> String {
    html_document(title, more, &html! { body { main id="main" { (content) } } })
}

fn navigation(current: PageView) -> Markup {
    html! {
        nav aria-label="Views" {
            @for (number, view) in (1..).zip(PageView::LISTED) {
                @let is_current = (view == current).then_some("page");
                a href=(view.path()) data-key=(number) aria-current=[is_current] { (view.title()) }
            }
        }
    }
}

pub(crate) fn refreshed_part(view: PageView, content: &Markup, notices: &[ActionNotice]) -> String {
    finish_page(html! {
        section id="notices" aria-label="Actions requested here" aria-live="polite" {
            @for notice in notices.iter().rev().take(4) {
                (notice_line(notice))
            }
        }
        main id="main" tabindex="-1" data-view=(view.word()) { (content) }
    })
}

fn notice_line(notice: &ActionNotice) -> Markup {
    let (class, outcome) = match &notice.outcome {
        ActionOutcome::Pending => ("busy", "running, requested ".to_owned()),
        ActionOutcome::Done(more) if more.is_empty() => ("good", "done, requested ".to_owned()),
        ActionOutcome::Done(more) => ("good", format!("done: {more}; requested ")),
        ActionOutcome::Failed(why) => ("bad", format!("not done: {why}; requested ")),
    };
    html! {
        p id={ "n-" (notice.id) } class=(class) {
            (notice.what) ": " (outcome) (moment_element(&notice.at))
        }
    }
}

pub(crate) fn help_view() -> Markup {
    let verdicts = GrowthVerdict::ALL.map(|verdict| (verdict.as_str(), phrases::verdict_phrase(verdict)));
    html! {
        h1 { "Keys and words" }
        h2 { "Keys" }
        (term_list(KEYS))
        h2 { "Verdicts on memory" }
        (term_list(verdicts))
        h2 { "Parts of the memory of a process" }
        (term_list(MEMORY_PARTS))
        h2 { "Actions" }
        (term_list(ACTIONS))
    }
}

const KEYS: [(&str, &str); 6] = [
    ("j, k or arrows", "the next and the previous row"),
    ("Enter", "the memory of the model of this row"),
    ("Tab", "from button to button, as everywhere"),
    ("/", "the filter; Enter applies it, Escape leaves it"),
    ("1 to 7", "the views, from left to right"),
    ("?", "this list"),
];

const MEMORY_PARTS: [(&str, &str); 4] = [
    ("weights", "tensors of the model, as planned from its file"),
    ("cache", "keys and values of its context, and its declared caches (prompt cache, checkpoints)"),
    ("growth", "everything beyond these since the process settled"),
    ("other", "code, buffers for computing, the GPU's context"),
];

const ACTIONS: [(&str, &str); 6] = [
    (
        "restart",
        "a fresh process replaces the old one when it is ready, or after the old one has ended; running \
         requests finish",
    ),
    ("reclaim", "the process gives unused memory back while it serves"),
    ("unload", "running requests end, then the process; the next request loads the model again"),
    ("load", "the model is started now"),
    ("release", "requests that are refused or suspected because a server died of them may be sent again"),
    (
        "pin, unpin",
        "whether a model may be unloaded for another one, whatever is configured, until llama-warden restarts",
    ),
];
