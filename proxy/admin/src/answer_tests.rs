//! Answers of the admin routes, for a fleet without models.

use std::path::Path;
use std::sync::Arc;

use http::header;
use http_body_util::BodyExt as _;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use warden_gateway::{GatewayControl, GatewayGauges, RequestRegistry};
use warden_supervisor::{Fleet, FleetConfig, SharedBudgets, WatchConfig, nursery};

use super::*;
use crate::access_log::AccessLog;
use crate::leaving::LeaveControl;
use crate::metrics::MetricsRegistry;
use crate::series::SeriesStore;
use crate::state::{AdminConfig, GatewayAccess, InstanceRecords};
use crate::status::{AdminStatus, InstanceInfo};
use crate::upgrade_order::UpgradeOrders;

/// An admin with a fleet without models; the directory has its ledger.
pub(crate) async fn admin() -> (AdminState, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let (nursery, handle) = nursery::nursery_channel();
    drop(nursery);
    let fleet = Fleet::start(config(dir.path()), handle).await.unwrap();
    let instance = InstanceInfo {
        pid: 1,
        version: "0".into(),
        address: "127.0.0.1:1".into(),
        admin_socket: "s".into(),
        started_at: "t".into(),
        ledger: "l".into(),
        ..InstanceInfo::default()
    };
    let gauges: Arc<GatewayGauges> = Arc::default();
    let admin = AdminState {
        fleet,
        metrics: Arc::new(MetricsRegistry::new()),
        config: watch::channel(AdminConfig::default()).1,
        leaving: Arc::new(LeaveControl::new(gauges.clone())),
        probe: Arc::new(warden_policies::defaults().probe.clone()),
        gateway: GatewayAccess {
            control: GatewayControl::default(),
            gauges,
            requests: RequestRegistry::default(),
            max_connections: 8,
        },
        caller: "a test".into(),
        instance: Arc::new(instance),
        records: InstanceRecords {
            access: AccessLog::none(),
            lost_log_lines: || 0,
            series: SeriesStore::new(&warden_policies::defaults().series, &dir.path().join("state")),
        },
        upgrades: UpgradeOrders::default(),
        stop: CancellationToken::new(),
    };
    (admin, dir)
}

pub(crate) fn config(dir: &Path) -> FleetConfig {
    let defaults = warden_policies::defaults();
    FleetConfig {
        remotes: Vec::new(),
        models: Vec::new(),
        any_name: false,
        shared: SharedBudgets::default(),
        loading: defaults.loading.clone(),
        canary: defaults.canary,
        health: defaults.health.clone(),
        growth: defaults.growth.clone(),
        runtime_dir: dir.join("run"),
        state_dir: dir.join("state"),
        watch: WatchConfig { sensors: defaults.sensors, child: defaults.child },
    }
}

async fn ask(admin: &AdminState, method: Method, path: &str) -> (u16, String) {
    let answer = admin.answer(&method, path, None, &HeaderMap::new()).await;
    let status = answer.status().as_u16();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn status_tells_who_we_are_and_what_runs() {
    let (admin, _dir) = admin().await;
    let (status, body) = ask(&admin, Method::GET, "/status").await;
    let told: AdminStatus = serde_json::from_str(&body).unwrap();
    assert_eq!((status, told.instance.pid, told.fleet.models.len()), (200, 1, 0));
    assert!(told.instance.memory_anon.is_some_and(|bytes| bytes > 0), "our own memory can be read");
}

#[tokio::test]
async fn an_operator_sends_balancers_away_and_calls_them_back() {
    let (admin, _dir) = admin().await;
    let said = |draining| DrainReport { draining, in_flight: 0 };
    let left = async |query: Option<&str>| {
        let answer = admin.answer(&Method::POST, "/drain", query, &HeaderMap::new()).await;
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice::<DrainReport>(&body).ok())
    };
    assert_eq!(left(None).await, (200, Some(said(true))));
    assert_eq!(left(None).await, (200, Some(said(true))));
    assert!(admin.facts().draining);
    assert!(ask(&admin, Method::GET, "/metrics").await.1.contains("\nllama_warden_pool_draining 1\n"));
    assert_eq!(left(Some("undo=1")).await, (200, Some(said(false))));
    assert!(!admin.facts().draining);
    admin.leaving.end(Duration::ZERO);
    assert_eq!(left(Some("undo")).await.0, 409, "who ends does not come back");
    let (_, asked) = ask(&admin, Method::GET, "/events").await;
    assert!(asked.contains("\"drain\"") && asked.contains("\"stay\""), "{asked}");
}

#[tokio::test]
async fn metrics_are_text_for_prometheus() {
    let (admin, _dir) = admin().await;
    let (status, body) = ask(&admin, Method::GET, "/metrics").await;
    assert!(status == 200 && body.contains("# TYPE llama_warden_limited_total counter\n"), "{body}");
    let mut headers = HeaderMap::new();
    let accepted = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2";
    headers.insert(header::ACCEPT, http::HeaderValue::from_static(accepted));
    let answer = admin.answer(&Method::GET, "/metrics", None, &headers).await;
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    assert!(body.ends_with(b"# EOF\n"), "{body:?}");
}

#[tokio::test]
async fn an_unknown_model_is_404_by_every_route() {
    let (admin, _dir) = admin().await;
    let mut told = String::new();
    for (method, verb) in [(Method::POST, "restart"), (Method::POST, "drain"), (Method::GET, "logs")] {
        let (status, body) = ask(&admin, method, &format!("/models/nobody/{verb}")).await;
        assert_eq!(status, 404, "{verb}");
        told.extend([body.as_str(), "\n"]);
    }
    insta::assert_snapshot!(told);
}

#[tokio::test]
async fn a_wrong_route_lists_the_right_ones_and_a_wrong_method_names_the_right_one() {
    let (admin, _dir) = admin().await;
    let (status, route) = ask(&admin, Method::GET, "/v1/models").await;
    assert_eq!(status, 404, "{route}");
    let (status, method) = ask(&admin, Method::GET, "/models/a/restart").await;
    assert_eq!(status, 405, "{method}");
    insta::assert_snapshot!([route, method].join("\n"));
}

#[tokio::test]
async fn requests_are_listed_and_one_that_is_not_there_is_told() {
    let (admin, _dir) = admin().await;
    let (status, body) = ask(&admin, Method::GET, "/requests").await;
    assert_eq!((status, body.trim()), (200, r#"{"in_flight":0,"requests":[],"left_out":0}"#));
    let (status, body) = ask(&admin, Method::POST, "/requests/nobody/cancel").await;
    assert!(status == 404 && body.contains("there is no request `nobody`"), "{status} {body}");
    let wrong = admin.answer(&Method::GET, "/requests", Some("state=busy"), &HeaderMap::new()).await;
    assert_eq!(wrong.status(), 400);
    let unknown = admin.answer(&Method::GET, "/requests", Some("model=nobody"), &HeaderMap::new()).await;
    assert_eq!(unknown.status(), 404);
}
