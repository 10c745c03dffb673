//! Refused heads, and the `Via` of passed ones.

use super::*;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{Empty, Full};

fn verdict(request: http::request::Builder) -> Result<(), WireError> {
    let (parts, ()) = request.body(()).unwrap().into_parts();
    check_request(&parts, &Empty::<Bytes>::new(), Ok(BodyFraming::None))
}

fn at(target: &str, host: &str) -> Result<(), WireError> {
    verdict(Request::get(target).header("host", host))
}

#[test]
fn a_host_is_one_name_with_an_optional_port() {
    for good in ["x", "localhost:8080", "127.0.0.1", "[::1]:80", "a-b.example.", "x:"] {
        assert_eq!(at("/", good), Ok(()), "{good}");
    }
    for bad in
        ["", ":80", "a b", "a/b", "a@b", "a?b", "a#b", "a\\b", "a,b", "a:b", "[::1", "[]", "::1", "a\"", "ü"]
    {
        assert_eq!(at("/", bad), Err(WireError::Host), "{bad}");
    }
    assert_eq!(verdict(Request::get("/")), Err(WireError::HostCount));
    assert_eq!(verdict(Request::get("/").version(Version::HTTP_10)), Ok(()));
    let two = Request::get("/").header("host", "x").header("host", "x");
    assert_eq!(verdict(two), Err(WireError::HostCount));
}

#[test]
fn an_absolute_target_is_of_the_same_host() {
    assert_eq!(at("http://x/a", "X"), Ok(()));
    assert_eq!(at("http://x:80/a", "x"), Ok(()));
    assert_eq!(at("https://x/a", "x:443"), Ok(()));
    assert_eq!(at("http://x/a", "y"), Err(WireError::HostDiffers));
    assert_eq!(at("http://x:81/a", "x"), Err(WireError::HostDiffers));
    assert_eq!(at("ftp://x/a", "x"), Err(WireError::Target));
    assert_eq!(at("http://user@x/a", "x"), Err(WireError::Host));
    assert_eq!(at("x:80", "x:80"), Err(WireError::Target), "authority-form is for CONNECT");
    assert_eq!(at("*", "x"), Err(WireError::Target), "asterisk-form is for OPTIONS");
    let star = http::uri::Builder::new().scheme("http").authority("x").path_and_query("*").build().unwrap();
    assert_eq!(verdict(Request::get(star).header("host", "x")), Err(WireError::Target));
    assert_eq!(verdict(Request::options("*").header("host", "x")), Ok(()));
}

#[test]
fn only_one_expectation_is_served() {
    let with = |value: &str| verdict(Request::post("/").header("host", "x").header("expect", value));
    assert_eq!(with("100-Continue"), Ok(()));
    assert_eq!(with("200-ok"), Err(WireError::Expectation));
    assert_eq!(with("100-continue, x"), Err(WireError::Expectation));
    assert_eq!(WireError::Expectation.status(), 417);
}

#[test]
fn a_request_with_our_own_name_in_via_goes_no_further_and_others_do() {
    let mut headers = HeaderMap::new();
    headers.append(VIA, HeaderValue::from_static("1.1 llama-warden-000000000000, 1.0 other"));
    assert!(!is_loop(&headers));
    add_via(&mut headers, Version::HTTP_11);
    assert!(is_loop(&headers));
    let all: Vec<_> = headers.get_all(VIA).iter().collect();
    assert_eq!(all.len(), 2);
    let ours = all[1].to_str().unwrap();
    assert!(ours.starts_with("1.1 llama-warden-"), "{ours}");
    let looping = Request::get("/").header("host", "x").header("via", format!("1.1 a, {ours} (b), 1.1 c"));
    assert_eq!(verdict(looping), Err(WireError::Loop));
}

#[test]
fn what_two_readers_do_not_agree_on_goes_nowhere() {
    let (parts, ()) = Request::post("/").header("host", "x").body(()).unwrap().into_parts();
    let five = Full::new(Bytes::from_static(b"hello"));
    assert_eq!(check_request(&parts, &five, Ok(BodyFraming::Length(5))), Ok(()));
    for seen in [
        Ok(BodyFraming::Length(4)),
        Ok(BodyFraming::Chunked),
        Ok(BodyFraming::None),
        Err(WireError::LengthAndCoding),
    ] {
        assert!(check_request(&parts, &five, seen).is_err(), "{seen:?}");
    }
    assert_eq!(check_request(&parts, &Empty::<Bytes>::new(), Ok(BodyFraming::None)), Ok(()));
}

#[test]
fn an_answer_whose_end_is_in_doubt_is_not_passed_on() {
    let answer = |fields: &[(&str, &str)]| {
        let mut builder = Response::builder();
        for (name, value) in fields {
            builder = builder.header(*name, *value);
        }
        check_answer(StatusCode::OK, builder.body(()).unwrap().headers())
    };
    assert_eq!(answer(&[("content-length", "5")]), Ok(()));
    assert_eq!(answer(&[("transfer-encoding", "Chunked")]), Ok(()));
    assert_eq!(answer(&[]), Ok(()));
    for bad in [
        &[("content-length", "5"), ("content-length", "5")][..],
        &[("content-length", "5, 5")],
        &[("content-length", "5"), ("transfer-encoding", "chunked")],
        &[("transfer-encoding", "gzip, chunked")],
        &[("transfer-encoding", "identity")],
        &[("transfer-encoding", "chunked"), ("transfer-encoding", "chunked")],
    ] {
        assert!(answer(bad).is_err(), "{bad:?}");
    }
    assert!(check_answer(StatusCode::SWITCHING_PROTOCOLS, &HeaderMap::new()).is_err());
}
