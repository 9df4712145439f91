{{- define "tasuki.name" -}}
{{- $name := default .Chart.Name .Release.Name -}}
{{- if contains .Chart.Name $name -}}{{ $name | trunc 40 | trimSuffix "-" }}{{- else -}}{{ printf "%s-%s" $name .Chart.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- /* Labels that select: they never change in the life of a release. */ -}}
{{- define "tasuki.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "tasuki.labels" -}}
{{ include "tasuki.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "tasuki.routerAccount" -}}
{{ .Values.router.serviceAccount.name | default (printf "%s-router" (include "tasuki.name" .)) }}
{{- end -}}

{{- /* A pool as YAML: the values of `worker` with what the pool has otherwise. */ -}}
{{- define "tasuki.pool" -}}
{{ mergeOverwrite (deepCopy .root.Values.worker) .pool | toYaml }}
{{- end -}}

{{- /* A hub's id is no path. */ -}}
{{- define "tasuki.isHub" -}}
{{- if not (hasPrefix "/" .Values.model.source) -}}yes{{- end -}}
{{- end -}}

{{- /* Replicas of a pool that is not divided. KEDA sets those of a scaled pool, so an upgrade keeps the
number that runs: without a number the API server would put 1. Arguments: root; values (`pool`) and
`full` name of the pool. */ -}}
{{- define "tasuki.replicas" -}}
{{- if .pool.autoscaling.enabled -}}
{{- $running := lookup "apps/v1" "Deployment" .root.Release.Namespace .full -}}
{{- if $running -}}
{{ $running.spec.replicas }}
{{- else -}}
{{ max (int .pool.replicas) (int .pool.autoscaling.minReplicas) }}
{{- end -}}
{{- else -}}
{{ .pool.replicas }}
{{- end -}}
{{- end -}}
