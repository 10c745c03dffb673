//! The view *Requests*: what is in flight and what ended last, as a table each, with a form per row that cancels. Pure, and without
//! script: a plain form does it.

use std::fmt::Write as _;

use warden_gateway::RequestView;
use warden_pages::escape;

use crate::admin::requests::{RequestList, short, took};
use crate::clock;

/// The form by which a request is cancelled, for a viewer who may do that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form<'a> {
    /// Where it is sent. It gets the fields `id` and `number`.
    pub(crate) action: &'a str,
    /// Name and value of the field that shows where the form came from.
    pub(crate) token: (&'a str, &'a str),
}

const HEAD: [(&str, &str); 11] = [
    ("Request", ""),
    ("Model", ""),
    ("State", ""),
    ("Client", "Name of the key, if keys are asked for, and address"),
    ("Began", ""),
    ("Took", "From the head of the request until now, or to its end"),
    ("Queued", "Waiting for a slot, or for the model"),
    ("Prompt", "Evaluating the prompt, and its tokens as far as they are known"),
    ("Answer", "Generating, and the tokens so far"),
    ("Process", "Generation and replica; how many it took"),
    ("", ""),
];

/// The content of `<main>`. `form`: `None` for who may only look.
pub(crate) fn view(list: &RequestList, form: Option<Form<'_>>) -> String {
    let (now, ended): (Vec<_>, Vec<_>) = list.requests.iter().partition(|one| one.is_in_flight());
    let mut html = String::from("<h1>Requests</h1>\n");
    table(&mut html, &format!("In flight: {}", list.in_flight), &now, "No request is in flight.", form);
    table(&mut html, "Ended last", &ended, "None has ended yet.", None);
    if list.left_out > 0 {
        let _ = writeln!(html, "<p>{} more are not shown.</p>", list.left_out);
    }
    html
}

// Writing to a string does not fail, here and below.
fn table(html: &mut String, caption: &str, rows: &[&RequestView], none: &str, form: Option<Form<'_>>) {
    let _ = write!(html, "<section>\n<h2>{caption}</h2>\n");
    if rows.is_empty() {
        let _ = write!(html, "<p>{none}</p>\n</section>\n");
        return;
    }
    // In a box of its own, so that a narrow screen moves the table and not the page.
    let _ = write!(
        html,
        "<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"{caption}\">\n<table>\n<thead><tr>"
    );
    for (name, title) in HEAD {
        if name.is_empty() {
            html.push_str("<td></td>");
        } else if title.is_empty() {
            let _ = write!(html, "<th scope=\"col\">{name}</th>");
        } else {
            let _ = write!(html, "<th scope=\"col\" title=\"{title}\">{name}</th>");
        }
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    for one in rows {
        row(html, one, form);
    }
    html.push_str("</tbody>\n</table>\n</div>\n</section>\n");
}

fn row(html: &mut String, one: &RequestView, form: Option<Form<'_>>) {
    let state = one.outcome.as_deref().unwrap_or(one.state.as_str());
    let model = one.model.as_ref().map_or("-", |model| model.as_str());
    let began = clock::text_of_unix_ms(one.began_unix_ms);
    let _ = write!(
        html,
        "<tr class=\"request {class}\"><th scope=\"row\"><code>{id}</code></th><td>{model}</td>\
         <td><span class=\"state\">{state}</span>{status}</td><td>{client}</td><td><time datetime=\"{began}\">{began}</time></td>\
         <td>{total}</td><td>{queued}</td><td>{prompt}</td><td>{answer}</td><td>{process}</td><td>",
        class = if one.cancelled { "cancelled" } else { one.state.as_str() },
        id = escape(&one.id),
        model = escape(model),
        state = escape(state),
        status = one.status.map(|status| format!(" {status}")).unwrap_or_default(),
        client = escape(&client(one)),
        total = took(one.total_ms),
        queued = took(one.queued_ms),
        prompt = escape(&short(one.prefill_ms, one.prompt_tokens)),
        answer = escape(&short(one.generating_ms, one.output_tokens)),
        process = escape(&process(one)),
    );
    if let Some(Form { action, token: (name, value) }) = form
        && one.is_in_flight()
    {
        if one.cancelled {
            html.push_str("is being cancelled");
        } else {
            let _ = write!(
                html,
                "<form method=\"post\" action=\"{action}\"><input type=\"hidden\" name=\"{name}\" value=\"{value}\">\
                 <input type=\"hidden\" name=\"id\" value=\"{id}\"><input type=\"hidden\" name=\"number\" value=\"{number}\">\
                 <button aria-label=\"Cancel request {id}\">Cancel</button></form>",
                action = escape(action),
                name = escape(name),
                value = escape(value),
                id = escape(&one.id),
                number = one.number,
            );
        }
    }
    html.push_str("</td></tr>\n");
}

fn client(one: &RequestView) -> String {
    one.key.as_ref().map_or_else(|| one.peer.clone(), |key| format!("{key} ({})", one.peer))
}

fn process(one: &RequestView) -> String {
    let generation = one.generation.map_or_else(|| "-".to_owned(), |generation| generation.to_string());
    let replica = one.replica.filter(|replica| *replica > 0).map(|replica| format!(", replica {replica}"));
    let attempts = (one.attempts > 1).then(|| format!(", attempt {}", one.attempts));
    [generation, replica.unwrap_or_default(), attempts.unwrap_or_default()].concat()
}

#[cfg(test)]
mod tests {
    use warden_gateway::RequestState;
    use warden_policies::ModelName;

    use super::*;
    use crate::admin::requests::tests::request;

    const FORM: Form<'_> = Form { action: "/page/requests/cancel", token: ("token", "0a1b") };

    fn list() -> RequestList {
        let evil = "<script>alert('1')</script>\"&";
        let hostile = RequestView {
            id: evil.to_owned(),
            key: Some(evil.to_owned()),
            model: Some(ModelName::new(evil)),
            ..request("x", RequestState::Queued)
        };
        let told = RequestView { cancelled: true, ..request("told", RequestState::Generating) };
        let away = RequestView {
            model: None,
            generation: None,
            key: None,
            outcome: Some("unknown_model".into()),
            status: Some(404),
            ..request("away", RequestState::Ended)
        };
        let requests = vec![hostile, told, request("done", RequestState::Ended), away];
        RequestList { in_flight: 2, requests, left_out: 3 }
    }

    #[test]
    fn requests_are_two_tables_with_a_form_for_each_that_can_be_cancelled() {
        insta::assert_snapshot!(view(&list(), Some(FORM)));
    }

    #[test]
    fn what_strangers_sent_is_text_and_who_may_not_cancel_has_no_form() {
        for form in [Some(FORM), None] {
            let html = view(&list(), form);
            assert!(!html.contains("<script") && !html.contains("='") && !html.contains("\"&\""), "{html}");
            assert_eq!(html.matches("<form").count(), usize::from(form.is_some()), "one can be cancelled");
        }
        assert!(view(&RequestList::default(), Some(FORM)).contains("No request is in flight."));
    }
}
