//! The frame around every view: head, navigation, the form that sends actions, help. Turns values into
//! markup.

use warden_pages::Html;

use super::files;
use super::hub::{ActionNotice, ActionOutcome};
use super::part::moment_element;
use super::view::PageView;

/// Icon of the page: bars in a square. Inline, so that browsers need not request it.
const PAGE_ICON: &str = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' rx='3' fill='%230a5aa5'/%3E%3Cpath d='M3 12V8h2v4zm4 0V4h2v8zm4 0V6h2v6z' fill='%23fff'/%3E%3C/svg%3E";

/// Values of the frame around a view.
pub(crate) struct PageFrame<'a> {
    pub(crate) view: PageView,
    /// Subject of the view, appended to its name in the title; may be empty.
    pub(crate) subject: &'a str,
    /// Path of the view with its query.
    pub(crate) here: &'a str,
    /// Token for forms, behind a random mask.
    pub(crate) token: &'a str,
    /// Id of this run of the program.
    pub(crate) boot: &'a str,
    /// Name of the key of the visitor's session, if there is one.
    pub(crate) signed_in: Option<&'a str>,
    /// Filter form of the view. It is not refreshed, so that a user's typing is not disturbed.
    pub(crate) controls: Html,
}

/// Writes the elements common to the `<head>` of every document.
pub(super) fn write_head(head: &mut Html, title: impl std::fmt::Display) {
    head.void("meta", &[("charset", &"utf-8")]);
    head.void("meta", &[("name", &"viewport"), ("content", &"width=device-width, initial-scale=1")]);
    head.void("meta", &[("name", &"color-scheme"), ("content", &"light dark")]);
    head.element("title", &[], title);
    head.void("link", &[("rel", &"icon"), ("href", &PAGE_ICON)]);
    head.within("style", &[], |style| {
        style.raw(&files::page_files().style.text);
    });
}

/// Returns a whole document around the refreshed part of a view.
pub(crate) fn page_document(frame: &PageFrame, part: &str) -> String {
    let mut html = Html::new();
    let (view, files) = (frame.view, files::page_files());
    html.raw("<!doctype html>").within("html", &[("lang", &"en")], |html| {
        html.within("head", &[], |head| {
            let of = if frame.subject.is_empty() { String::new() } else { format!(" of {}", frame.subject) };
            write_head(head, format_args!("{}{of} · llama-warden", view.title()));
            head.element("script", &[("type", &"module"), ("src", &files.script.path)], "");
        });
        let here = frame.here;
        let attributes: warden_pages::html::HtmlAttributes =
            &[("data-boot", &frame.boot), ("data-view", &view.word()), ("data-files", &files.tag)];
        html.within("body", attributes, |body| {
            body.element("a", &[("class", &"skip"), ("href", &"#main")], "Skip to the content");
            body.within("header", &[("class", &"top")], |top| {
                top.within("nav", &[("aria-label", &"Views")], |nav| write_navigation(nav, view));
                top.element("p", &[("id", &"live"), ("class", &"quiet"), ("role", &"status")], "");
            });
            body.within("form", &[("id", &"act"), ("method", &"post"), ("action", &"/page/act")], |form| {
                form.void("input", &[("type", &"hidden"), ("name", &"token"), ("value", &frame.token)]);
                form.void("input", &[("type", &"hidden"), ("name", &"back"), ("value", &here)]);
            });
            if !frame.controls.as_str().is_empty() {
                body.raw(frame.controls.as_str());
            }
            body.raw(part);
            body.within("footer", &[("class", &"quiet")], |foot| {
                foot.text("Keys: ").raw(
                    "<kbd>j</kbd> <kbd>k</kbd> rows, <kbd>/</kbd> filter, <kbd>1</kbd>–<kbd>8</kbd> views, ",
                );
                foot.element("a", &[("href", &"/page/help"), ("id", &"help-link")], "all keys and words");
                foot.text(". Times are in UTC where no script runs.");
                if let Some(key) = frame.signed_in {
                    sign_out(foot, key, frame.token);
                }
            });
        });
    });
    html.raw("\n");
    html.into_string()
}

/// Writes the sign-out form. No script handles it, because it leads to another page.
fn sign_out(body: &mut Html, key: &str, token: &str) {
    let about: warden_pages::html::HtmlAttributes =
        &[("method", &"post"), ("action", &"/page/sign-out"), ("id", &"sign-out")];
    body.within("form", about, |form| {
        form.void("input", &[("type", &"hidden"), ("name", &"token"), ("value", &token)]);
        form.element("span", &[("class", &"quiet")], format_args!("Signed in with the key {key}. "));
        form.element("button", &[], "Sign out");
    });
}

fn write_navigation(nav: &mut Html, current: PageView) {
    for (number, view) in (1..).zip(PageView::LISTED) {
        let key = number.to_string();
        let (path, title) = (view.path(), view.title());
        if view == current {
            nav.element("a", &[("href", &path), ("data-key", &key), ("aria-current", &"page")], title);
        } else {
            nav.element("a", &[("href", &path), ("data-key", &key)], title);
        }
    }
}

/// Returns the part of a document that is refreshed: notices, then the view.
pub(crate) fn refreshed_part(view: PageView, content: &Html, notices: &[ActionNotice]) -> String {
    let mut html = Html::new();
    html.within(
        "section",
        &[("id", &"notices"), ("aria-label", &"Actions requested here"), ("aria-live", &"polite")],
        |all| {
            for notice in notices.iter().rev().take(4) {
                all.within(
                    "p",
                    &[("id", &format_args!("n-{}", notice.id)), ("class", &outcome_class(&notice.outcome))],
                    |p| {
                        p.text(format_args!("{}: ", notice.what));
                        match &notice.outcome {
                            ActionOutcome::Pending => p.text("running, requested "),
                            ActionOutcome::Done(more) if more.is_empty() => p.text("done, requested "),
                            ActionOutcome::Done(more) => p.text(format_args!("done: {more}; requested ")),
                            ActionOutcome::Failed(why) => p.text(format_args!("not done: {why}; requested ")),
                        };
                        p.raw(&moment_element(&notice.at));
                    },
                );
            }
        },
    );
    html.within("main", &[("id", &"main"), ("tabindex", &"-1"), ("data-view", &view.word())], |main| {
        main.raw(content.as_str());
    });
    html.into_string()
}

const fn outcome_class(outcome: &ActionOutcome) -> &'static str {
    match outcome {
        ActionOutcome::Pending => "busy",
        ActionOutcome::Done(_) => "good",
        ActionOutcome::Failed(_) => "bad",
    }
}

/// Returns the help view: keyboard shortcuts and terms.
pub(crate) fn help_view() -> Html {
    let mut html = Html::new();
    html.element("h1", &[], "Keys and words");
    html.element("h2", &[], "Keys");
    html.terms([
        ("j, k or arrows", "the next and the previous row"),
        ("Enter", "the memory of the model of this row"),
        ("Tab", "from button to button, as everywhere"),
        ("/", "the filter; Enter applies it, Escape leaves it"),
        ("1 to 8", "the views, from left to right"),
        ("?", "this list"),
    ]);
    html.element("h2", &[], "Verdicts on memory");
    html.terms(
        warden_pages::words::ALL_VERDICTS
            .map(|verdict| (verdict.as_str(), warden_pages::words::explain_verdict(verdict))),
    );
    html.element("h2", &[], "Parts of the memory of a process");
    html.terms([
        ("weights", "tensors of the model, as planned from its file"),
        ("cache", "keys and values of its context, and its declared caches (prompt cache, checkpoints)"),
        ("growth", "everything beyond these since the process settled"),
        ("other", "code, buffers for computing, the GPU's context"),
    ]);
    html.element("h2", &[], "Actions");
    html.terms([
        ("restart", "a fresh process replaces the old one when it is ready, or after the old one has ended; running requests finish"),
        ("reclaim", "the process gives unused memory back while it serves"),
        ("unload", "running requests end, then the process; the next request loads the model again"),
        ("load", "the model is started now"),
        ("release", "requests that are refused or suspected because a server died of them may be sent again"),
        ("pin, unpin", "whether a model may be unloaded for another one, whatever is configured, until llama-warden restarts"),
    ]);
    html
}
