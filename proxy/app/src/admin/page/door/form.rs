//! Markup for visitors who are not signed in: a form for a key. Turns values into markup.

use warden_pages::Html;

use super::super::frame::write_head;

/// Returns the sign-in page. `why`: the error of the last attempt.
pub(super) fn sign_in_page(back: &str, why: Option<&str>) -> String {
    bare_document("Sign in", None, |main| {
        main.element("h1", &[], "llama-warden");
        if let Some(why) = why {
            main.element("p", &[("class", &"bad"), ("role", &"alert")], why);
        }
        main.within(
            "form",
            &[("method", &"post"), ("action", &"/page/sign-in"), ("class", &"filter")],
            |form| {
                form.void("input", &[("type", &"hidden"), ("name", &"back"), ("value", &back)]);
                form.element("label", &[("for", &"key")], "Key of an operator");
                form.void(
                    "input",
                    &[
                        ("id", &"key"),
                        ("name", &"key"),
                        ("type", &"password"),
                        ("autocomplete", &"current-password"),
                        ("required", &""),
                        ("autofocus", &""),
                    ],
                );
                form.element("button", &[], "Sign in");
            },
        );
        main.element(
            "p",
            &[("class", &"quiet")],
            "The browser keeps it for some hours, as a cookie that no script can read. A key with `operator = true` in the file of keys opens the page.",
        );
    })
}

/// Returns a page that redirects by itself. A navigation from another site does not send the session
/// cookie, but a navigation from this page does.
pub(super) fn redirect_page(to: &str) -> String {
    bare_document("llama-warden", Some(to), |main| {
        main.within("p", &[], |p| {
            p.element("a", &[("href", &to)], "Continue to the page");
        });
    })
}

fn bare_document(title: &str, onward: Option<&str>, content: impl FnOnce(&mut Html)) -> String {
    let mut html = Html::new();
    html.raw("<!doctype html>").within("html", &[("lang", &"en")], |html| {
        html.within("head", &[], |all| {
            write_head(all, title);
            if let Some(to) = onward {
                all.void("meta", &[("http-equiv", &"refresh"), ("content", &format_args!("0;url={to}"))]);
            }
        });
        html.within("body", &[], |body| {
            body.within("main", &[("id", &"main")], content);
        });
    });
    html.raw("\n");
    html.into_string()
}
