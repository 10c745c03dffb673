//! The view *Requests*: a table of requests in flight and a table of ended requests, with a form in each
//! row that cancels the request. Pure, and works without a script.

use maud::{Markup, html};
use warden_admin::clock;
use warden_admin::requests::{RequestList, milliseconds_text, timing_text};
use warden_gateway::RequestView;

const COLUMNS: [(&str, &str); 10] = [
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
];

/// `token`: the form token of a viewer who may cancel.
pub(crate) fn requests_view(list: &RequestList, token: Option<&str>) -> Markup {
    let (now, ended): (Vec<_>, Vec<_>) = list.requests.iter().partition(|one| one.is_in_flight());
    let in_flight = format!("In flight: {}", list.in_flight);
    html! {
        h1 { "Requests" }
        (request_section(&in_flight, &now, "No request is in flight.", token))
        (request_section("Ended last", &ended, "None has ended yet.", None))
        @if list.left_out > 0 {
            p { (list.left_out) " more are not shown." }
        }
    }
}

fn request_section(caption: &str, rows: &[&RequestView], none: &str, token: Option<&str>) -> Markup {
    html! {
        section {
            h2 { (caption) }
            @if rows.is_empty() {
                p { (none) }
            } @else {
                // Put a box around the table, so that on a narrow screen only the table scrolls.
                div class="wide" tabindex="0" role="region" aria-label=(caption) {
                    table {
                        thead {
                            tr {
                                @for (name, title) in COLUMNS {
                                    @let title = (!title.is_empty()).then_some(title);
                                    th scope="col" title=[title] { (name) }
                                }
                                td {}
                            }
                        }
                        tbody {
                            @for one in rows {
                                (request_row(one, token))
                            }
                        }
                    }
                }
            }
        }
    }
}

fn request_row(one: &RequestView, token: Option<&str>) -> Markup {
    let began = clock::unix_ms_text(one.began_unix_ms);
    let class = if one.cancelled { "cancelled" } else { one.state.as_str() };
    html! {
        tr id={ "q-" (one.number) } class={ "request " (class) } {
            th scope="row" { code { (one.id) } }
            td { (one.model.as_ref().map_or("-", |model| model.as_str())) }
            td {
                span class="state" { (one.outcome.as_deref().unwrap_or(one.state.as_str())) }
                @if let Some(status) = one.status { " " (status) }
            }
            td { (client_text(one)) }
            td { time datetime=(began) { (began) } }
            td { (milliseconds_text(one.total_ms)) }
            td { (milliseconds_text(one.queued_ms)) }
            td { (timing_text(one.prefill_ms, one.prompt_tokens)) }
            td { (timing_text(one.generating_ms, one.output_tokens)) }
            td { (process_text(one)) }
            td {
                @if let Some(token) = token {
                    (cancel_form(one, token))
                }
            }
        }
    }
}

fn cancel_form(one: &RequestView, token: &str) -> Markup {
    html! {
        @if one.is_in_flight() && one.cancelled {
            "is being cancelled"
        } @else if one.is_in_flight() {
            form method="post" action="/page/cancel" {
                input type="hidden" name="token" value=(token);
                input type="hidden" name="id" value=(one.id);
                input type="hidden" name="number" value=(one.number);
                button aria-label={ "Cancel request " (one.id) } { "Cancel" }
            }
        }
    }
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
    use crate::request_fixture::request;

    const TOKEN: Option<&str> = Some("0a1b");

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
        insta::assert_snapshot!(requests_view(&list(), TOKEN).into_string().replace("><", ">\n<"));
    }

    #[test]
    fn what_strangers_sent_is_text_and_who_may_not_cancel_has_no_form() {
        for token in [TOKEN, None] {
            let html = requests_view(&list(), token).into_string();
            assert!(!html.contains("<script") && !html.contains("='") && !html.contains("\"&\""), "{html}");
            assert_eq!(html.matches("<form").count(), usize::from(token.is_some()), "one can be cancelled");
        }
        let empty = requests_view(&RequestList::default(), TOKEN).into_string();
        assert!(empty.contains("No request is in flight."));
    }
}
