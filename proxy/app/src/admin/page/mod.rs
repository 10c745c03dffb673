//! The page for a browser: running models, their memory, the next actions and their reasons. Rendered here
//! and readable without a script; a script keeps it up to date.
//!
//! ```text
//!   request ─ guard: allowed? ─ view: which one? ─┬─ hub: the shared picture ─ overview, … ─ frame ─ gzip
//!                                                 ├─ live: stream of picture numbers
//!                                                 └─ act: token, one action, a notice
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`guard`] | checks hosts and origins; pure |
//! | [`door`] | the public listener: keys, sessions |
//! | [`token`] | token in forms |
//! | [`view`] | views and paths; pure |
//! | `admin/query.rs` | queries and forms; pure |
//! | [`hub`] | the shared picture, notices |
//! | [`tally`], [`pace`] | counters of requests, and their rates |
//! | [`holds`] | memory of processes compared with their budgets; pure |
//! | [`frame`] | frame around every view; pure |
//! | [`overview`], [`memory`], [`requests`], [`events`], [`configuration`], [`builds`], [`diagnose`] | the views; pure |
//! | [`drawn`] | plot of one recorded memory; pure |
//! | [`part`] | parts shared by several views; pure |
//! | [`reports`] | files of `diagnose` |
//! | [`act`] | actions |
//! | [`live`] | the stream |
//! | [`files`] | style and script, compiled in |
//! | [`answer`] | answers and their headers |

mod act;
mod answer;
mod builds;
mod configuration;
mod diagnose;
pub(crate) mod door;
mod drawn;
mod events;
mod files;
mod frame;
mod guard;
pub(crate) mod holds;
pub(crate) mod hub;
mod live;
mod memory;
mod overview;
mod pace;
mod part;
pub(crate) mod reports;
pub(crate) mod requests;
mod search;
pub(crate) mod tally;
mod token;
mod view;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Incoming;
use warden_pages::Html;
use warden_policies::ModelName;
use warden_supervisor::{WorkKind, run_job};

use self::answer::{Kind, page, plain, refuse};
use self::guard::Refused;
use self::hub::{Picture, Rendered};
use self::view::{View, Way, way};
use super::answer::{Admin, Body};
use super::query::Query;
use super::requests::Filter;
use crate::series::answer::{MemoryData, of_model};

/// Limit of a form in bytes: one action, one name, one address.
const FORM: usize = 64 << 10;
/// Limit for reading a form; a browser on this machine sends it.
const FORM_TIME: Duration = Duration::from_secs(10);
/// Limit of a query in bytes: a filter and names.
const QUERY: usize = 8 << 10;

/// Facts about the visitor that decide what is shown and allowed.
#[derive(Clone, Default)]
struct Visitor {
    /// Name for events and the ledger.
    who: Option<String>,
    /// Name of the session's key, if there is a session.
    key: Option<Arc<str>>,
    /// Checks that the visitor's right still holds; streams call it repeatedly.
    still: Option<Still>,
}

/// Checks whether a right still holds.
type Still = Arc<dyn Fn() -> bool + Send + Sync>;

/// Answers a request, if it is one for the page. `peer`: address of the client; `None` on the socket.
pub(crate) async fn serve(
    admin: &Admin,
    request: Request<Incoming>,
    peer: Option<IpAddr>,
) -> Result<Response<Body>, Request<Incoming>> {
    let uri = request.uri().clone();
    let Some(way) = way(uri.path()) else { return Err(request) };
    let method = request.method().clone();
    if let Err(refused) = guard::judge(&method, request.headers(), way.is_document()) {
        return Ok(refuse(StatusCode::FORBIDDEN, &refused));
    }
    let visitor = Visitor { who: Some(act::who(peer)), ..Visitor::default() };
    Ok(go(admin, way, request, visitor).await)
}

/// Answers a visitor who may have the page.
async fn go(admin: &Admin, way: Way<'_>, request: Request<Incoming>, visitor: Visitor) -> Response<Body> {
    let (uri, method) = (request.uri().clone(), request.method().clone());
    let reads = method != Method::POST;
    if reads == matches!(way, Way::Act | Way::Cancel) {
        return refuse(StatusCode::METHOD_NOT_ALLOWED, &Refused::Method);
    }
    let query = uri.query().unwrap_or_default();
    if query.len() > QUERY {
        return refuse(StatusCode::URI_TOO_LONG, &format!("a query has {QUERY} bytes at most"));
    }
    match way {
        Way::There => answer::lead("/page/"),
        Way::View(view) => show(admin, view, query, request.headers(), &visitor).await,
        Way::Live => live::stream(admin, visitor.still),
        Way::Act | Way::Cancel => do_it(admin, request, visitor.who.as_deref(), way == Way::Cancel).await,
        Way::File(name) => match files::named(name) {
            Some(file) => answer::file(file, request.headers()),
            None => refuse(StatusCode::NOT_FOUND, &"there is no such file: load the page again"),
        },
        Way::Report(name) => report(admin, name).await,
        Way::Nothing => refuse(StatusCode::NOT_FOUND, &"there is no such view: /page/ leads to all of them"),
    }
}

/// Renders a view: whole, or with `part=1` only its refreshed part.
async fn show(
    admin: &Admin,
    view: View,
    query: &str,
    headers: &HeaderMap,
    visitor: &Visitor,
) -> Response<Body> {
    let asked = Query::of(Some(query));
    let picture = admin.page.picture(admin);
    let make = |content: &Html| {
        let text = frame::part(view, content, &picture.notices);
        Rendered {
            gzip: files::gzip(text.as_bytes(), flate2::Compression::fast()),
            tag: files::hash(text.as_bytes()),
            plain: text.into(),
        }
    };
    let part = match view {
        View::Overview => {
            let wish = overview::Wish::of(&asked);
            let key = format!("{wish:?}");
            admin.page.view(&picture, &key, || make(&overview::view(&picture, &wish)))
        }
        View::Memory => match remembered(admin, query).await {
            Ok(Some(data)) if asked.get("file").is_some() => return answer::download(&data),
            Ok(Some(data)) => make(&memory::view(&data)),
            Ok(None) => make(&listed(admin).await),
            Err(why) => make(&without(view, &why)),
        },
        other => make(&content(admin, other, &asked, &picture).await),
    };
    if asked.get("fragment").is_some() {
        return page(&part, headers);
    }
    let of = asked.get("model").filter(|_| matches!(view, View::Memory | View::Events | View::Logs));
    let path = view.path();
    let here = if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") };
    let token = admin.page.token.masked();
    let frame = frame::Frame {
        view,
        of: of.unwrap_or_default(),
        here: &here,
        token: &token,
        boot: &admin.page.boot,
        signed_in: visitor.key.as_deref(),
        controls: controls(view, &asked, &picture),
    };
    let text = frame::document(&frame, std::str::from_utf8(&part.plain).unwrap_or_default());
    plain(StatusCode::OK, Kind::Page, text.into(), Some(headers))
}

/// The filters of a view.
fn controls(view: View, asked: &Query, picture: &Picture) -> Html {
    let fleet = &picture.status.fleet;
    let models = || fleet.models.iter().chain(&fleet.canaries).map(|model| &model.name);
    match view {
        View::Overview => overview::form(&overview::Wish::of(asked)),
        View::Events => events::Wish::of(asked).form(view.path(), models(), true),
        View::Logs => log_wish(asked, picture).form(view.path(), models(), false),
        View::Configuration => configuration::form(asked.get("q").unwrap_or_default()),
        View::Memory | View::Requests | View::Builds | View::Diagnose | View::Help => Html::new(),
    }
}

/// The filter for logs, which belong to one model; without a name, the first model.
fn log_wish(asked: &Query, picture: &Picture) -> events::Wish {
    let mut wish = events::Wish::of(asked);
    if wish.model.is_empty() {
        let first = picture.status.fleet.models.first();
        wish.model = first.map(|model| model.name.to_string()).unwrap_or_default();
    }
    wish
}

async fn content(admin: &Admin, view: View, asked: &Query, picture: &Arc<Picture>) -> Html {
    match view {
        View::Overview => overview::view(picture, &overview::Wish::of(asked)),
        View::Events => {
            let (all, wish) = (admin.fleet.events().events, events::Wish::of(asked));
            // The redaction searches every text for secrets.
            blocking(WorkKind::Pages, move || events::events(&all, &wish)).await.unwrap_or_default()
        }
        View::Logs => {
            let mut wish = log_wish(asked, picture);
            let lines = admin.fleet.logs(&wish.model).map(|tail| tail.lines);
            if lines.is_none() {
                wish.model.clear();
            }
            let lines = lines.unwrap_or_default();
            blocking(WorkKind::Pages, move || events::logs(&lines, &wish)).await.unwrap_or_default()
        }
        View::Configuration => {
            let told = admin.told.borrow().clone();
            // A thousand models have tens of thousands of settings.
            let text =
                blocking(WorkKind::Pages, move || told.configuration.map(|kept| (kept.text(), kept.pending)))
                    .await
                    .flatten();
            let (text, pending) = text.map_or((None, Vec::new()), |(text, pending)| (Some(text), pending));
            configuration::view(text.as_deref(), &pending, asked.get("q").unwrap_or_default())
        }
        View::Builds => {
            let data = std::path::PathBuf::from(&picture.status.instance.data_dir);
            let picture = picture.clone();
            // Paths are resolved on the disk, so that builds of the store are recognized under every name.
            let view = move || builds::view(&picture, &builds::Shelf::read(&data), &data);
            blocking(WorkKind::StateFiles, view).await.unwrap_or_default()
        }
        View::Diagnose => {
            let folder = reports::folder(&picture.status.instance.ledger);
            let place = folder.clone();
            let all = blocking(WorkKind::StateFiles, move || reports::read(&place)).await.unwrap_or_default();
            diagnose::view(&all, &folder, own_models(picture))
        }
        View::Help => frame::help(),
        View::Requests => in_flight(admin, asked),
        // Answered above, because it needs the query as written.
        View::Memory => Html::new(),
    }
}

fn own_models(picture: &Picture) -> impl Iterator<Item = &ModelName> {
    picture.status.fleet.models.iter().filter(|model| model.remote.is_none()).map(|model| &model.name)
}

/// The view of requests in flight and ended.
fn in_flight(admin: &Admin, asked: &Query) -> Html {
    if let Some(id) = asked.get("id") {
        let mut html = Html::new();
        html.raw(&requests::one(id, admin.one_request(id).as_ref()));
        return html;
    }
    let filter = Filter { model: asked.get("model").map(str::to_owned), ..Filter::default() };
    let form = requests::Form { action: "/page/cancel", token: ("token", &admin.page.shown_token) };
    match admin.list_requests(&filter) {
        Ok(list) => {
            let mut html = Html::new();
            html.raw(&requests::view(&list, Some(form), &admin.captures.ids()));
            html
        }
        Err(unknown) => without(View::Requests, &unknown),
    }
}

/// Recorded memory of the requested model; `None` if the query names none.
async fn remembered(admin: &Admin, query: &str) -> Result<Option<MemoryData>, String> {
    let ask = crate::series::ask::Ask::of(Some(query), admin.series.policy())?;
    let Some(model) = &ask.model else { return Ok(None) };
    // The query may use an alias.
    let own = admin.fleet.resolve(Some(model)).map_or_else(|_| model.clone(), |name| name.to_string());
    let data = of_model(&admin.series, &admin.fleet.view(), &own, &ask).await;
    data.map(Some).map_err(|nothing| nothing.to_string())
}

/// The models with recorded memory.
async fn listed(admin: &Admin) -> Html {
    match crate::series::answer::list(&admin.series).await {
        Ok(listed) => memory::listing(&listed, &admin.fleet.view()),
        Err(failed) => without(View::Memory, &failed.to_string()),
    }
}

/// A view that cannot be shown, and the reason.
fn without(view: View, why: &str) -> Html {
    let mut html = Html::new();
    html.element("h1", &[], view.title()).element("p", &[], why);
    html
}

/// Runs `work` on other threads than those that serve, because a disk may be slow.
async fn blocking<T: Send + 'static>(kind: WorkKind, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    run_job(kind, work)
        .await
        .inspect_err(|error| tracing::warn!(%error, "a part of the page is missing"))
        .ok()
}

async fn report(admin: &Admin, name: &str) -> Response<Body> {
    let folder = reports::folder(&admin.instance.ledger);
    let name = warden_gateway::percent_decoded(name);
    let content = blocking(WorkKind::StateFiles, move || reports::one(&folder, &name?)).await.flatten();
    match content {
        Some(content) => plain(StatusCode::OK, Kind::Report, content.into(), None),
        None => refuse(StatusCode::NOT_FOUND, &"there is no such report, or it is too large to be shown"),
    }
}

/// Reads a form.
///
/// # Errors
/// The answer to a form that is too large or too slow.
async fn read_form(request: Request<Incoming>) -> Result<Query, Box<Response<Body>>> {
    let body = Limited::new(request.into_body(), FORM).collect();
    let refused = |status, why: &dyn std::fmt::Display| Err(Box::new(refuse(status, why)));
    match tokio::time::timeout(FORM_TIME, body).await {
        Ok(Ok(form)) => Ok(Query::of(std::str::from_utf8(&form.to_bytes()).ok())),
        Ok(Err(_)) => refused(StatusCode::PAYLOAD_TOO_LARGE, &format!("a form has {FORM} bytes at most")),
        Err(_) => refused(StatusCode::REQUEST_TIMEOUT, &"the form did not come within 10 s"),
    }
}

async fn do_it(
    admin: &Admin,
    request: Request<Incoming>,
    who: Option<&str>,
    cancels: bool,
) -> Response<Body> {
    let json = request.headers().get(header::ACCEPT).is_some_and(|accept| accept == "application/json");
    let form = match read_form(request).await {
        Ok(form) => form,
        Err(refused) => return *refused,
    };
    let ours = |said: &str| admin.page.token.is(said);
    let who = who.unwrap_or("page").to_owned();
    let begun = if cancels {
        act::cancel(admin, &form, ours, &who).map(|id| (id, View::Requests.path().to_owned()))
    } else {
        act::order(&form, ours).and_then(|order| {
            let back = order.back.clone();
            Ok((act::begin(admin, order, who)?, back))
        })
    };
    match begun {
        Ok((id, _)) if json => {
            plain(StatusCode::ACCEPTED, Kind::Json, format!("{{\"notice\":{id}}}\n").into(), None)
        }
        Ok((_, back)) => answer::lead(&back),
        Err(wrong) => {
            let status = match wrong {
                act::Wrong::Refused(_) => StatusCode::FORBIDDEN,
                act::Wrong::Unknown(_) => StatusCode::BAD_REQUEST,
                act::Wrong::TooMany => StatusCode::TOO_MANY_REQUESTS,
            };
            refuse(status, &wrong)
        }
    }
}
