//! The view *Requests*: a table of requests in flight and a table of ended requests, with a form in each
//! row that cancels the request. Pure, and works without a script.

use std::fmt::Write as _;

use warden_gateway::RequestView;
use warden_pages::escape;

use crate::admin::requests::{RequestDetail, RequestList, milliseconds_text, timing_text};
use crate::clock;

/// The form that cancels a request, for a viewer with that right.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CancelForm<'a> {
    /// URL of the form, which sends the fields `id` and `number`.
    pub(crate) action: &'a str,
    /// Name and value of the field that proves the form's origin.
    pub(crate) token: (&'a str, &'a str),
}

const HEAD: [(&str, &str); 11] = [
    ("Request", ""),
    ("Model", ""),
    ("State", ""),
    ("Client", "Name of the key, if keys are required, and address"),
    ("Began", ""),
    ("Took", "From the head of the request until now, or to its end"),
    ("Queued", "Waiting for a slot, or for the model"),
    ("Prompt", "Evaluating the prompt, and its tokens as far as they are known"),
    ("Answer", "Generating, and the tokens so far"),
    ("Process", "Generation and replica; how many it took"),
    ("", ""),
];

/// Returns the content of the page's `<main>` element. `form`: `None` for viewers who may not cancel.
/// `recorded`: ids of recorded requests.
pub(crate) fn requests_view(list: &RequestList, form: Option<CancelForm<'_>>, recorded: &[String]) -> String {
    let (now, ended): (Vec<_>, Vec<_>) = list.requests.iter().partition(|one| one.is_in_flight());
    let mut html = String::from("<h1>Requests</h1>\n");
    let in_flight = format!("In flight: {}", list.in_flight);
    write_table(&mut html, &in_flight, &now, "No request is in flight.", form, recorded);
    write_table(&mut html, "Ended last", &ended, "None has ended yet.", None, recorded);
    if list.left_out > 0 {
        let _ = writeln!(html, "<p>{} more are not shown.</p>", list.left_out);
    }
    html
}

// Here and below, writing to a string cannot fail.
fn write_table(
    html: &mut String,
    caption: &str,
    rows: &[&RequestView],
    none: &str,
    form: Option<CancelForm<'_>>,
    recorded: &[String],
) {
    let _ = write!(html, "<section>\n<h2>{caption}</h2>\n");
    if rows.is_empty() {
        let _ = write!(html, "<p>{none}</p>\n</section>\n");
        return;
    }
    // Put the table into a box, so that on a narrow screen only the table scrolls.
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
        write_row(html, one, form, recorded.contains(&one.id));
    }
    html.push_str("</tbody>\n</table>\n</div>\n</section>\n");
}

/// Returns the view of a recorded request.
pub(crate) fn recorded_request(id: &str, found: Option<&RequestDetail>) -> String {
    let mut html = format!("<h1>Request <code>{}</code></h1>\n", escape(id));
    let Some(found) = found else {
        html.push_str("<p>It is not in flight, nor among those that ended last.</p>\n");
        return html;
    };
    let all: Vec<&RequestView> = found.requests.iter().collect();
    write_table(&mut html, "Details", &all, "It is not among those that ended last.", None, &[]);
    html.push_str("<section>\n<h2>As it was recorded</h2>\n");
    if let Some(recorded) = &found.recorded {
        html.push_str(
            "<p>Without its content: texts are replaced by others of the same length, \
             names by others, pictures by ours \
             (<code>record_requests</code>).</p>\n",
        );
        if recorded.bytes > recorded.line.len() {
            let _ = writeln!(html, "<p>Only the beginning of {} bytes is kept.</p>", recorded.bytes);
        }
        let text = serde_json::from_str::<serde_json::Value>(&recorded.line)
            .and_then(|value| serde_json::to_string_pretty(&value))
            .unwrap_or_else(|_| recorded.line.clone());
        let _ = writeln!(
            html,
            "<pre class=\"log\" tabindex=\"0\" role=\"region\" aria-label=\"The request as it was recorded\">{}</pre>",
            escape(&text)
        );
    } else {
        html.push_str(
            "<p>It was not recorded: the requests of a model are where it has <code>record_requests</code>, the last \
             ones can be looked at here.</p>\n",
        );
    }
    html.push_str("</section>\n<p><a href=\"/page/requests\">All requests</a></p>\n");
    html
}

fn write_row(html: &mut String, one: &RequestView, form: Option<CancelForm<'_>>, recorded: bool) {
    let link = if recorded {
        let href = crate::admin::query::address_with_query("/page/requests", &[("id", &one.id)]);
        format!("<a href=\"{}\"><code>{}</code></a>", escape(&href), escape(&one.id))
    } else {
        format!("<code>{}</code>", escape(&one.id))
    };
    let state = one.outcome.as_deref().unwrap_or(one.state.as_str());
    let model = one.model.as_ref().map_or("-", |model| model.as_str());
    let began = clock::unix_ms_text(one.began_unix_ms);
    let _ = write!(
        html,
        "<tr id=\"q-{number}\" class=\"request {class}\"><th scope=\"row\">{link}</th><td>{model}</td>\
         <td><span class=\"state\">{state}</span>{status}</td><td>{client}</td><td><time datetime=\"{began}\">{began}</time></td>\
         <td>{total}</td><td>{queued}</td><td>{prompt}</td><td>{answer}</td><td>{process}</td><td>",
        number = one.number,
        class = if one.cancelled { "cancelled" } else { one.state.as_str() },
        model = escape(model),
        state = escape(state),
        status = one.status.map(|status| format!(" {status}")).unwrap_or_default(),
        client = escape(&client_text(one)),
        total = milliseconds_text(one.total_ms),
        queued = milliseconds_text(one.queued_ms),
        prompt = escape(&timing_text(one.prefill_ms, one.prompt_tokens)),
        answer = escape(&timing_text(one.generating_ms, one.output_tokens)),
        process = escape(&process_text(one)),
    );
    if let Some(CancelForm { action, token: (name, value) }) = form
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

fn client_text(one: &RequestView) -> String {
    one.key.as_ref().map_or_else(|| one.peer.clone(), |key| format!("{key} ({})", one.peer))
}

fn process_text(one: &RequestView) -> String {
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
    use crate::captures::CapturedRequest;

    const FORM: CancelForm<'_> = CancelForm { action: "/page/requests/cancel", token: ("token", "0a1b") };

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
        insta::assert_snapshot!(requests_view(&list(), Some(FORM), &[]));
    }

    #[test]
    fn what_strangers_sent_is_text_and_who_may_not_cancel_has_no_form() {
        for form in [Some(FORM), None] {
            let html = requests_view(&list(), form, &[list().requests[0].id.clone()]);
            assert!(!html.contains("<script") && !html.contains("='") && !html.contains("\"&\""), "{html}");
            assert_eq!(html.matches("<form").count(), usize::from(form.is_some()), "one can be cancelled");
        }
        let hostile = list().requests.remove(0);
        let recorded =
            |line: &str| CapturedRequest { id: hostile.id.clone(), line: line.to_owned(), bytes: 99 };
        for line in ["{\"a\": \"<script>\"}", "<script"] {
            let found = RequestDetail { requests: vec![hostile.clone()], recorded: Some(recorded(line)) };
            let html = recorded_request(&hostile.id, Some(&found));
            assert!(!html.contains("<script") && html.contains("Only the beginning of 99"), "{html}");
        }
        assert!(recorded_request("<script>", None).contains("&lt;script&gt;"));
        assert!(requests_view(&RequestList::default(), Some(FORM), &[]).contains("No request is in flight."));
    }
}
