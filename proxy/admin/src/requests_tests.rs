//! Filters of the list of requests, and errors of invalid ones.

use super::*;
use crate::request_fixture::request;

#[test]
fn a_query_is_read_and_what_means_nothing_is_told() {
    let read = |query: &str| RequestFilter::from_query(Some(query));
    assert_eq!(RequestFilter::from_query(None), Ok(RequestFilter::default()));
    let all = RequestFilter {
        model: Some("org/a b".into()),
        state: Some(StateFilter::State(RequestState::Prefill)),
        limit: Some(5),
    };
    assert_eq!(read("model=org%2Fa+b&state=prefill&limit=5"), Ok(all));
    assert_eq!(read("state=in_flight").map(|filter| filter.state), Ok(Some(StateFilter::InFlight)));
    let wrong = ["state=busy", "limit=many", "limit=-1", "modell=m"].map(|query| read(query).unwrap_err());
    insta::assert_snapshot!(wrong.join("\n"));
    assert_eq!((number_from_query(None), number_from_query(Some("number=7"))), (Ok(None), Ok(Some(7))));
    assert!(number_from_query(Some("number=x")).is_err() && number_from_query(Some("id=7")).is_err());
}

#[test]
fn what_is_asked_for_is_shown_and_how_much_is_left_out() {
    let all = || {
        let other = RequestView { model: None, ..request("c", RequestState::Receiving) };
        vec![
            request("a", RequestState::Queued),
            request("b", RequestState::Sent),
            other,
            request("d", RequestState::Ended),
        ]
    };
    let ids = |list: &RequestList| list.requests.iter().map(|one| one.id.clone()).collect::<String>();
    let ask =
        |query: &str, model| filter_requests(all(), &RequestFilter::from_query(Some(query)).unwrap(), model);
    let list = ask("", None);
    assert_eq!((ids(&list).as_str(), list.in_flight, list.left_out), ("abcd", 3, 0));
    assert_eq!(ids(&ask("", Some("m"))), "abd");
    assert_eq!(ids(&ask("state=ended", None)), "d");
    assert_eq!(ids(&ask("state=in_flight", Some("m"))), "ab");
    let list = ask("limit=1", None);
    assert_eq!((ids(&list).as_str(), list.in_flight, list.left_out), ("a", 3, 3));
}

#[test]
fn times_have_the_digits_that_say_something() {
    let all = [0.4, 12.0, 999.4, 1234.0, 59_900.0, 61_000.0, 7_300_000.0].map(milliseconds_text);
    assert_eq!(all, ["0 ms", "12 ms", "999 ms", "1.2 s", "59.9 s", "1 min 1 s", "2 h 1 min"]);
    assert_eq!(
        [(None, 0), (None, 5), (Some(9.0), 0), (Some(9.0), 5)].map(|(ms, tokens)| timing_text(ms, tokens)),
        ["-", "5", "9 ms", "9 ms, 5"]
    );
}
