//! The page on the public listener, for holders of an operator's key. A browser sends no key when it opens
//! an address, so a form asks for the key once, and a session cookie replaces the key. A program may send
//! the key with each request, as on other routes.
//!
//! ```text
//!   request ─ guard ─┬─ style, script ──────────────────────────────> as on the admin socket
//!                    ├─ sign-in ─ a key with the right? ─────────────────> session, cookie
//!                    └─ other ─ cookie or key, with the right now? ─┬─ no ──> the form, or 401, 403, 429
//!                                                                   └─ yes ─> the page, in the name of the key
//! ```
//!
//! | module | job |
//! |---|---|
//! | `sessions` | sessions of signed-in browsers |
//! | `attempts` | limit of wrong keys by address |

mod attempts;
mod sessions;

use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::time::Instant;
use warden_admin::query::{QueryPairs, address_with_query};
use warden_admin::response::AdminBody;
use warden_gateway::{ApiKeys, GatewayControl, KeyHash, OperatorPage, PageAnswer, PageClient};

use self::attempts::SignInAttempts;
use self::sessions::{PageSessions, SESSION_LIFETIME};
use crate::answer::{PageContent, redirect, refusal_response, uncached_response};
use crate::serve::{PageVisitor, read_form, serve_allowed};
use crate::state::PageState;
use crate::view::{PageRoute, is_page_address, parse_path};
use crate::{frame, guard};

const SIGN_IN_PATH: &str = "/page/sign-in";
const SIGN_OUT_PATH: &str = "/page/sign-out";

/// Answers requests for the page on the public listener, for holders of an operator's key.
pub struct SignInGuard {
    /// Runtime in which pages are made, separate from the threads that pass answers on.
    runtime: Handle,
    /// State of the page. Its `stop` ends streams when the listener ends, before the fleet ends.
    page: PageState,
    sessions: PageSessions,
    attempts: SignInAttempts,
}

/// A visitor with access, and the visitor's session, if there is one.
struct SignedInVisitor {
    name: Arc<str>,
    session: Option<String>,
}

#[derive(Debug, thiserror::Error)]
enum SignInError {
    #[error("sign in at /page/sign-in, or send a key with `operator = true`")]
    NoKey,
    #[error("there is no such key")]
    WrongKey,
    #[error("the key `{0}` does not open this page: in the file of keys it lacks `operator = true`")]
    NoRight(Arc<str>),
    #[error("too many wrong keys came from this address: try again in {0} s")]
    TooMany(u64),
}

impl OperatorPage for SignInGuard {
    fn answer(self: Arc<Self>, request: Request<Incoming>, asker: PageClient) -> PageAnswer {
        let answered = self.runtime.clone().spawn(async move { self.answer_one(request, &asker).await });
        Box::pin(async move {
            answered.await.unwrap_or_else(|_| {
                refusal_response(StatusCode::INTERNAL_SERVER_ERROR, &"the page could not be made")
            })
        })
    }
}

impl SignInGuard {
    /// Uses the caller's runtime to make pages.
    pub fn new(page: PageState) -> Self {
        Self {
            runtime: Handle::current(),
            page,
            sessions: PageSessions::default(),
            attempts: SignInAttempts::default(),
        }
    }

    async fn answer_one(
        self: &Arc<Self>,
        request: Request<Incoming>,
        asker: &PageClient,
    ) -> Response<AdminBody> {
        let uri = request.uri().clone();
        let method = request.method().clone();
        let way = parse_path(uri.path()).unwrap_or(PageRoute::Nothing);
        let judged = guard::check_public_request(
            &method,
            request.headers(),
            way.is_document(),
            &asker.host,
            asker.tls,
        );
        if let Err(refused) = judged {
            return refusal_response(StatusCode::FORBIDDEN, &refused);
        }
        if let (PageRoute::File(_), true) = (way, method != Method::POST) {
            return serve_allowed(&self.page, way, request, PageVisitor::default()).await;
        }
        let known = self.identify(request.headers(), asker);
        if uri.path() == SIGN_IN_PATH {
            return self.sign_in(request, asker, known.is_ok()).await;
        }
        let known = match known {
            Ok(known) => known,
            Err(why) => return refusal(&why, &request, way),
        };
        if uri.path() == SIGN_OUT_PATH {
            return self.sign_out(request, known).await;
        }
        let control = self.page.admin.gateway.control.clone();
        let sessions = Arc::downgrade(self);
        let session = known.session.clone();
        let visitor = PageVisitor {
            who: Some(format!("page, key {}, {}", known.name, asker.peer)),
            key: known.session.is_some().then(|| known.name.clone()),
            still_allowed: Some(Arc::new(move || {
                // A stream without a session was opened with a key in a header, and ends with its connection.
                let Some(secret) = &session else { return true };
                let key = sessions.upgrade().and_then(|door| door.sessions.key(secret, Instant::now()));
                key.is_some_and(|key| key_name_with_right(&control, &key).is_ok())
            })),
        };
        serve_allowed(&self.page, way, request, visitor).await
    }

    fn identify(&self, headers: &HeaderMap, asker: &PageClient) -> Result<SignedInVisitor, SignInError> {
        let control = &self.page.admin.gateway.control;
        for secret in cookies(headers, &cookie_name(&asker.host)) {
            if let Some(key) = self.sessions.key(secret, Instant::now())
                && let Ok(name) = key_name_with_right(control, &key)
            {
                return Ok(SignedInVisitor { name, session: Some(secret.to_owned()) });
            }
        }
        let keys = ApiKeys::presented_hashes(headers);
        if keys.is_empty() {
            Err(SignInError::NoKey)
        } else {
            self.match_key(&keys, asker).map(|(name, _)| SignedInVisitor { name, session: None })
        }
    }

    /// Returns the first of `keys` that has the right to open the page.
    fn match_key(&self, keys: &[KeyHash], asker: &PageClient) -> Result<(Arc<str>, KeyHash), SignInError> {
        let mut why = SignInError::WrongKey;
        for key in keys {
            match key_name_with_right(&self.page.admin.gateway.control, key) {
                Ok(name) => return Ok((name, *key)),
                Err(SignInError::WrongKey) => {}
                Err(other) => why = other,
            }
        }
        // Limit only attempts with a wrong key, because behind a proxy all visitors have the same address.
        if let Err(wait) = self.attempts.check(asker.peer, Instant::now()) {
            return Err(SignInError::TooMany(wait.as_secs() + 1));
        }
        self.attempts.count_wrong(asker.peer, Instant::now());
        tracing::warn!(target: "page", peer = %asker.peer, "sign-in to the page was refused: {why}");
        Err(why)
    }

    async fn sign_in(
        &self,
        request: Request<Incoming>,
        asker: &PageClient,
        is_in: bool,
    ) -> Response<AdminBody> {
        if request.method() != Method::POST {
            let query = QueryPairs::lenient(request.uri().query());
            let back = return_path(&query);
            return if is_in {
                redirect(back)
            } else {
                html_response(StatusCode::OK, frame::sign_in_page(back, None))
            };
        }
        let secure = asker.tls
            || request
                .headers()
                .get(header::ORIGIN)
                .is_some_and(|origin| origin.as_bytes().starts_with(b"https://"));
        let form = match read_form(request).await {
            Ok(form) => form,
            Err(refused) => return *refused,
        };
        let back = return_path(&form);
        let Some(key) = form.get("key").map(str::trim).filter(|key| !key.is_empty()) else {
            return html_response(
                StatusCode::UNAUTHORIZED,
                frame::sign_in_page(back, Some("A key is needed.")),
            );
        };
        match self.match_key(&[KeyHash::from_key(key.as_bytes())], asker) {
            Ok((name, key)) => {
                tracing::info!(target: "page", peer = %asker.peer, key = %name, "signed in on the page");
                let secret = self.sessions.open(key, Instant::now());
                with_cookie(redirect(back), &asker.host, &secret, SESSION_LIFETIME.as_secs(), secure)
            }
            Err(why) => {
                let text = frame::sign_in_page(back, Some(&format!("{why}.")));
                with_retry_after(&why, html_response(status_code(&why), text))
            }
        }
    }

    async fn sign_out(&self, request: Request<Incoming>, known: SignedInVisitor) -> Response<AdminBody> {
        if request.method() != Method::POST {
            return refusal_response(StatusCode::METHOD_NOT_ALLOWED, &guard::PageRefusal::Method);
        }
        let host = request
            .headers()
            .get(header::HOST)
            .and_then(|host| host.to_str().ok())
            .unwrap_or_default()
            .to_owned();
        let host = request.uri().authority().map_or(host, ToString::to_string);
        let form = match read_form(request).await {
            Ok(form) => form,
            Err(refused) => return *refused,
        };
        if !form.get("token").is_some_and(|token| self.page.hub.token.matches(token)) {
            return refusal_response(StatusCode::FORBIDDEN, &guard::PageRefusal::Token);
        }
        if let Some(secret) = known.session {
            self.sessions.close(&secret);
        }
        with_cookie(redirect(SIGN_IN_PATH), &host, "", 0, false)
    }
}

/// Returns the answer to a refused visitor: the sign-in form for a person, a sentence for a script.
fn refusal(why: &SignInError, request: &Request<Incoming>, way: PageRoute<'_>) -> Response<AdminBody> {
    let headers = request.headers();
    let opens = request.method() == Method::GET && way.is_document();
    let fragment = QueryPairs::lenient(request.uri().query()).get("fragment").is_some();
    if !opens || fragment || !matches!(why, SignInError::NoKey) {
        return with_retry_after(why, refusal_response(status_code(why), why));
    }
    let here = request.uri().path_and_query().map_or("/page/", http::uri::PathAndQuery::as_str);
    let here = if is_page_address(here) { here } else { "/page/" };
    if headers.get(guard::FETCH_SITE).is_some_and(|site| site != "same-origin" && site != "none") {
        return html_response(StatusCode::OK, frame::redirect_page(here));
    }
    redirect(&address_with_query(SIGN_IN_PATH, &[("back", here)]))
}

fn key_name_with_right(control: &GatewayControl, key: &KeyHash) -> Result<Arc<str>, SignInError> {
    match control.known_key(key) {
        Some((name, true)) => Ok(name),
        Some((name, false)) => Err(SignInError::NoRight(name)),
        None => Err(SignInError::WrongKey),
    }
}

const fn status_code(why: &SignInError) -> StatusCode {
    match why {
        SignInError::NoKey | SignInError::WrongKey => StatusCode::UNAUTHORIZED,
        SignInError::NoRight(_) => StatusCode::FORBIDDEN,
        SignInError::TooMany(_) => StatusCode::TOO_MANY_REQUESTS,
    }
}

fn with_retry_after(why: &SignInError, mut answer: Response<AdminBody>) -> Response<AdminBody> {
    if let SignInError::TooMany(seconds) = why {
        answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(*seconds));
    }
    answer
}

fn html_response(status: StatusCode, text: String) -> Response<AdminBody> {
    uncached_response(status, PageContent::Page, text.into(), None)
}

fn return_path(asked: &QueryPairs) -> &str {
    asked
        .get("back")
        .filter(|back| is_page_address(back) && !back.starts_with("/page/sign-"))
        .unwrap_or("/page/")
}

/// The cookie's name contains the port, because browsers share cookies between all ports of a host.
fn cookie_name(host: &str) -> String {
    let port = host.rsplit_once(':').map_or("", |(_, port)| port);
    let port: String = port.chars().filter(char::is_ascii_digit).take(5).collect();
    format!("llama-warden-{port}")
}

/// Returns up to four values of a cookie, because a page of a neighbouring host may set another of its name.
fn cookies<'a>(headers: &'a HeaderMap, name: &str) -> impl Iterator<Item = &'a str> {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let pairs = all.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.filter(move |(known, _)| *known == name).map(|(_, value)| value).take(4)
}

/// Sets the cookie for paths below `/page` only, so that no request to a model carries it.
fn with_cookie(
    mut answer: Response<AdminBody>,
    host: &str,
    secret: &str,
    seconds: u64,
    secure: bool,
) -> Response<AdminBody> {
    let name = cookie_name(host);
    let secure = if secure { "; Secure" } else { "" };
    let text = format!("{name}={secret}; Path=/page; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}");
    if let Ok(value) = HeaderValue::try_from(text) {
        answer.headers_mut().insert(header::SET_COOKIE, value);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_is_found_among_others_and_belongs_to_one_port() {
        let mut headers = HeaderMap::new();
        headers.append(header::COOKIE, "a=b; llama-warden-8080=one; x".parse().unwrap());
        headers.append(header::COOKIE, "llama-warden-8080=two;llama-warden-80=three".parse().unwrap());
        let found = |host: &str| cookies(&headers, &cookie_name(host)).collect::<Vec<_>>();
        assert_eq!(found("h:8080"), ["one", "two"]);
        assert_eq!(found("[::1]:80"), ["three"]);
        assert!(found("h").is_empty() && found("h:8080; Domain=evil").len() == 2);
        let answer = with_cookie(redirect("/page/"), "h:1;2\r\n3", "s", 9, true);
        let told = answer.headers()[header::SET_COOKIE].to_str().unwrap();
        assert_eq!(told, "llama-warden-123=s; Path=/page; Max-Age=9; HttpOnly; SameSite=Strict; Secure");
    }

    #[test]
    fn nobody_is_led_elsewhere_after_signing_in() {
        for to in [
            "//evil.example",
            "https://evil.example/page/",
            "/v1/models",
            "/page/sign-out",
            "/page/sign-in?back=x",
        ] {
            assert_eq!(
                return_path(&QueryPairs::lenient(Some(&address_with_query("", &[("back", to)])[1..]))),
                "/page/",
                "{to}"
            );
        }
        let far = QueryPairs::lenient(Some("back=/page/memory%3Fmodel%3Da"));
        assert_eq!(return_path(&far), "/page/memory?model=a");
        assert!(!frame::sign_in_page("\"><script>", Some("<b>")).contains("<script>"));
    }
}
